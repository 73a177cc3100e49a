// The null device's linker. It checks what it is given, and what it puts together has all of the kernels.
#pragma once

#include "driver_table.h"

namespace xmig::device {

void add_linker_functions(DriverTable& table);

}  // namespace xmig::device
