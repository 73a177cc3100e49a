// Collectives of devices whose memory is this process's own (cpu, null): the reference, with a fixed order of summation. The input of
// rank 0 comes first, then that of rank 1 and so on, for every element.
//
// Where a device's memory has no content (null), ranks meet and connect, and operations do nothing: its functions of the host all run on
// one thread, where two ranks of a process could not wait for each other.
//
// Operations run as functions of the host in the program's streams; those of a communicator one after the other, in the order in which
// they were begun. One that has failed holds its stream up: what comes after it would compute with what is not there.
#pragma once

#include <memory>

#include "device/collectives.h"
#include "driver_table.h"

namespace xmig::device {

enum class Content : bool { kNone, kMemory };
std::unique_ptr<Collectives> host_collectives(const DriverTable& driver, Content content);

}  // namespace xmig::device
