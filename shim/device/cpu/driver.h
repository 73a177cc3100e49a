// The functions of the driver table, by topic.
#pragma once

#include "driver_table.h"

namespace xmig::device::cpu {

void add_device_functions(DriverTable& table);
void add_memory_functions(DriverTable& table);
void add_stream_functions(DriverTable& table);
void add_event_functions(DriverTable& table);
void add_graph_functions(DriverTable& table);
void add_module_functions(DriverTable& table);

}  // namespace xmig::device::cpu
