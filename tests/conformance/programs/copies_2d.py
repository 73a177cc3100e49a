"""cudaMemcpy2D between every pair of places, and the driver's three-dimensional copy."""

from ctypes import Structure, addressof, byref, c_size_t, c_uint, c_void_p, create_string_buffer

from calls import D2D, D2H, DEFAULT, DRIVER, H2D, H2H, RUNTIME, expect, expect_error, malloc, pattern, say

HEIGHT = 37
for width, host_pitch in ((1, 3), (64, 64), (1000, 1001), (5000, 8192)):
    pitch_out, pointer = c_size_t(), c_void_p()
    RUNTIME.cudaMallocPitch(byref(pointer), byref(pitch_out), width, HEIGHT)
    one, pitch = pointer.value or 0, pitch_out.value
    two = malloc(width * HEIGHT)
    data = pattern(host_pitch * HEIGHT, width)
    source, back = create_string_buffer(data, len(data)), create_string_buffer(len(data))
    RUNTIME.cudaMemcpy2D(one, pitch, source, host_pitch, width, HEIGHT, H2D)
    RUNTIME.cudaMemcpy2D(two, width, one, pitch, width, HEIGHT, D2D)
    RUNTIME.cudaMemcpy2D(back, host_pitch, two, width, width, HEIGHT, D2H)
    rows = [data[r * host_pitch : r * host_pitch + width] for r in range(HEIGHT)]
    got = [back.raw[r * host_pitch : r * host_pitch + width] for r in range(HEIGHT)]
    expect(rows == got, f"rows of {width} bytes")
    gaps = [back.raw[r * host_pitch + width : (r + 1) * host_pitch] for r in range(HEIGHT)]
    expect(not any(b"".join(gaps)), "bytes between the rows are left alone")
    flat = create_string_buffer(width * HEIGHT)
    RUNTIME.cudaMemcpy2DAsync(flat, width, one, pitch, width, HEIGHT, DEFAULT, 0)
    RUNTIME.cudaDeviceSynchronize()
    expect(flat.raw == b"".join(rows), "default kind")
    RUNTIME.cudaMemcpy2D(flat, width, source, host_pitch, width, HEIGHT, H2H)
    expect(flat.raw == b"".join(rows), "host to host")
    say(width, pitch, flat.raw)

expect_error(RUNTIME, 12, "cudaMemcpy2D", one, pitch, addressof(source), 10, 11, 2, H2D)


class Copy3D(Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        ("srcXInBytes", c_size_t),
        ("srcY", c_size_t),
        ("srcZ", c_size_t),
        ("srcLOD", c_size_t),
        ("srcMemoryType", c_uint),
        ("srcHost", c_void_p),
        ("srcDevice", c_void_p),
        ("srcArray", c_void_p),
        ("reserved0", c_void_p),
        ("srcPitch", c_size_t),
        ("srcHeight", c_size_t),
        ("dstXInBytes", c_size_t),
        ("dstY", c_size_t),
        ("dstZ", c_size_t),
        ("dstLOD", c_size_t),
        ("dstMemoryType", c_uint),
        ("dstHost", c_void_p),
        ("dstDevice", c_void_p),
        ("dstArray", c_void_p),
        ("reserved1", c_void_p),
        ("dstPitch", c_size_t),
        ("dstHeight", c_size_t),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
        ("Depth", c_size_t),
    )


# A box of 5 x 4 x 3 out of the middle of one of 10 x 8 x 6, to the device and back to another corner.
X, Y, Z = 10, 8, 6
data = pattern(X * Y * Z, 3)
source = create_string_buffer(data, len(data))
box = malloc(5 * 4 * 3)
target = create_string_buffer(X * Y * Z)
HOST, DEVICE = 1, 2
DRIVER.cuMemcpy3D_v2(
    byref(
        Copy3D(
            srcXInBytes=2,
            srcY=3,
            srcZ=1,
            srcMemoryType=HOST,
            srcHost=addressof(source),
            srcPitch=X,
            srcHeight=Y,
            dstMemoryType=DEVICE,
            dstDevice=box,
            dstPitch=5,
            dstHeight=4,
            WidthInBytes=5,
            Height=4,
            Depth=3,
        )
    )
)
DRIVER.cuMemcpy3D_v2(
    byref(
        Copy3D(
            srcMemoryType=DEVICE,
            srcDevice=box,
            srcPitch=5,
            srcHeight=4,
            dstXInBytes=1,
            dstY=1,
            dstZ=2,
            dstMemoryType=HOST,
            dstHost=addressof(target),
            dstPitch=X,
            dstHeight=Y,
            WidthInBytes=5,
            Height=4,
            Depth=3,
        )
    )
)
expected = bytearray(X * Y * Z)
for z in range(3):
    for y in range(4):
        begin_from, begin_to = ((z + 1) * Y + y + 3) * X + 2, ((z + 2) * Y + y + 1) * X + 1
        expected[begin_to : begin_to + 5] = data[begin_from : begin_from + 5]
expect(target.raw == bytes(expected), "a box")
say("box", target.raw)
