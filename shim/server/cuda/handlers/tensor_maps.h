// Tensor maps: the client's arguments, given to the device's driver.
#pragma once

#include "driver_table.h"
#include "server/records/record.h"

namespace xmig::server {

class TensorMaps {
 public:
  explicit TensorMaps(const DriverTable& driver) : driver_(driver) {}

  CUresult on_xmTensorMap(Record& record);

 private:
  const DriverTable& driver_;
};

}  // namespace xmig::server
