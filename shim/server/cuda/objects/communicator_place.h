// A communicator as a record describes it: where this rank's place in it is, and what its ranks call their meetings.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <span>
#include <string>

#include "device/collectives.h"
#include "ops.h"

namespace xmig::server {

inline constexpr const char* kJoin = "join";  // of which a communicator's name is made

// What ranks know of a group and nobody else does: the group of a part of it, or the name of a meeting.
device::GroupId derived(const device::GroupId& group, const std::string& how);
// In hexadecimal digits. Not the group itself, which is the ranks' secret.
std::string meeting_of(const device::GroupId& group, const std::string& what);
// `payload`: the library, and what its user has set for that. The context is left open.
device::Place place_of(const Args_xmCommInit& args, std::span<const std::byte> payload);

}  // namespace xmig::server
