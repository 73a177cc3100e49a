"""What a program asks about its devices."""

from ctypes import create_string_buffer

from calls import DRIVER, RUNTIME, byref, c_int, c_size_t, expect, expect_error, left_out, say

count, version, device = c_int(), c_int(), c_int()
RUNTIME.cudaDriverGetVersion(byref(version))
say("driver", version.value)
RUNTIME.cudaGetDeviceCount(byref(count))
say("devices", count.value)

for ordinal in range(count.value):
    RUNTIME.cudaSetDevice(ordinal)
    RUNTIME.cudaGetDevice(byref(device))
    expect(device.value == ordinal, "the current device")
    # Name, uuid and totalGlobalMem lie at the same place in the structures of 12.x and 13.x.
    properties = create_string_buffer(4096)
    if RUNTIME.has("cudaGetDeviceProperties_v2"):
        RUNTIME.cudaGetDeviceProperties_v2(properties, ordinal)
    else:
        RUNTIME.cudaGetDeviceProperties(properties, ordinal)
    total = int.from_bytes(properties.raw[288:296], "little")
    say(ordinal, properties.raw[:256].split(b"\0")[0].decode(), properties.raw[256:272].hex(), total)
    expect(total > 0, "device memory")

    values = []
    for attribute in range(1, 120):
        value = c_int()
        if RUNTIME.code("cudaDeviceGetAttribute", byref(value), attribute, ordinal) == 0:
            values.append((attribute, value.value))
    for attribute, found_value in values:
        say("attribute", attribute, found_value)
    known = dict(values)
    expect(known[1] >= 256, "largest block")
    expect(known[10] == 32, "warp size")
    if not left_out("the driver offers concurrent managed access"):
        expect(known[89] == 0, "concurrent managed access is not offered")

    name = create_string_buffer(16)
    bus = create_string_buffer(20)
    RUNTIME.cudaDeviceGetPCIBusId(bus, 20, ordinal)
    found = c_int()
    RUNTIME.cudaDeviceGetByPCIBusId(byref(found), bus)
    expect(found.value == ordinal, "the device of its own bus id")
    say(bus.value.decode())
    DRIVER.cuDeviceGetUuid_v2(name, ordinal)
    expect(name.raw == properties.raw[256:272], "one uuid")
    size = c_size_t()
    DRIVER.cuDeviceTotalMem_v2(byref(size), ordinal)
    expect(size.value == total, "one size of memory")

expect_error(RUNTIME, 101, "cudaSetDevice", count.value)
expect_error(RUNTIME, 101, "cudaSetDevice", -1)
low, high = c_int(), c_int()
RUNTIME.cudaDeviceGetStreamPriorityRange(byref(low), byref(high))
say("priorities", low.value, high.value)
expect(high.value <= 0 <= low.value, "priorities")
