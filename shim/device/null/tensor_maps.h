// Tensor maps of the null device: no hardware reads them, so they are made up, each telling its arguments apart. What is
// checked is what cuda.h demands and programs get wrong.
#pragma once

#include <cuda.h>

#include "driver_table.h"

namespace xmig::device {

void add_tensor_map_functions(DriverTable& table);

}  // namespace xmig::device
