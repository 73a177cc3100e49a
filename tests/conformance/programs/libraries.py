"""Modules and libraries by the driver interface: loading, kernels, parameters, globals, unloading."""

from calls import (
    DRIVER,
    RUNTIME,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_void_p,
    expect,
    expect_error,
    image,
    left_out,
    malloc,
    pack,
    read,
    say,
    write,
)

COUNT = b"count"
RUNTIME.cudaFree(0)  # makes the primary context current
code = image()


def launch(function: c_void_p, *arguments: int) -> None:
    DRIVER.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, pack(*arguments), 0)


def counted(function: c_void_p) -> int:
    launch(function, out)
    return int.from_bytes(read(out, 8), "little")


out = malloc(8)
module, function = c_void_p(), c_void_p()
DRIVER.cuModuleLoadData(byref(module), c_char_p(code))
DRIVER.cuModuleGetFunction(byref(function), module, c_char_p(COUNT))
expect([counted(function) for _ in range(5)] == [6, 7, 8, 9, 10], "a global of the module counts from 5")

# The global by name: read and written from outside.
where, size = c_void_p(), c_size_t()
DRIVER.cuModuleGetGlobal_v2(byref(where), byref(size), module, c_char_p(b"launches"))
expect(size.value == 8, "size of the global")
expect(int.from_bytes(read(where.value or 0, 8), "little") == 10, "content of the global")
write(where.value or 0, (100).to_bytes(8, "little"))
expect(counted(function) == 101, "after writing the global")
DRIVER.cuModuleGetGlobal_v2(byref(where), byref(size), module, c_char_p(b"table"))
say("table", read(where.value or 0, size.value))
expect_error(DRIVER, 500, "cuModuleGetGlobal_v2", byref(where), byref(size), module, c_char_p(b"no such"))
expect_error(DRIVER, 500, "cuModuleGetFunction", byref(function), module, c_char_p(b"no such"))
DRIVER.cuModuleGetFunction(byref(function), module, c_char_p(COUNT))

# The same image again is a module of its own.
second, other = c_void_p(), c_void_p()
DRIVER.cuModuleLoadDataEx(byref(second), c_char_p(code), 0, 0, 0)
DRIVER.cuModuleGetFunction(byref(other), second, c_char_p(COUNT))
expect([counted(other), counted(function), counted(other)] == [6, 102, 7], "two modules of one image")
DRIVER.cuModuleUnload(second)
expect(counted(function) == 103, "after unloading the second")

# What a kernel says about itself.
library, kernel, count = c_void_p(), c_void_p(), c_uint()
DRIVER.cuLibraryLoadData(byref(library), c_char_p(code), 0, 0, 0, 0, 0, 0)
DRIVER.cuLibraryGetKernelCount(byref(count), library)
kernels = (c_void_p * count.value)()
DRIVER.cuLibraryEnumerateKernels(kernels, count.value, library)
names = []
for handle in kernels:
    name, offset, length = c_char_p(), c_size_t(), c_size_t()
    DRIVER.cuKernelGetName(byref(name), c_void_p(handle))
    parameters: list[tuple[int, int]] = []
    while DRIVER.code("cuKernelGetParamInfo", c_void_p(handle), len(parameters), byref(offset), byref(length)) == 0:
        parameters.append((offset.value, length.value))
    threads, shared = c_int(), c_int()
    DRIVER.cuKernelGetAttribute(byref(threads), 0, c_void_p(handle), 0)
    DRIVER.cuKernelGetAttribute(byref(shared), 1, c_void_p(handle), 0)
    say((name.value or b"").decode(), parameters, threads.value, shared.value)
    names.append(name.value)
functions = (c_void_p * count.value)()
DRIVER.cuModuleEnumerateFunctions(functions, count.value, module)
of_module = []
for handle in functions:
    DRIVER.cuFuncGetName(byref(name), c_void_p(handle))
    of_module.append(name.value)
say("in the module", *((found or b"").decode() for found in of_module))
if not left_out("in which order a driver has them is not reported anywhere"):
    expect(names == of_module[::-1], "as measured: a library has its kernels in the opposite order of a module")
DRIVER.cuLibraryGetKernel(byref(kernel), library, c_char_p(COUNT))
DRIVER.cuKernelGetFunction(byref(function), kernel)
expect([counted(function), counted(kernel)] == [6, 7], "a kernel and its function, in a library of its own")
DRIVER.cuLibraryGetGlobal(byref(where), byref(size), library, c_char_p(b"launches"))
expect(int.from_bytes(read(where.value or 0, 8), "little") == 7, "a global of the library")
DRIVER.cuLibraryUnload(library)
DRIVER.cuModuleUnload(module)

# What is not a module. The headers of a half one speak of all of it: something has to be there to be read.
for bad in (b"", b"\x7fELF", b"not a module image at all", code[:1000], code[: len(code) // 2]):
    answer = DRIVER.code("cuModuleLoadData", byref(module), c_char_p(bad + bytes(len(code))))
    expect(answer in (200, 209, 218, 201, 1), f"a bad image gives {answer}")
write(out, bytes(8))
say("still here", read(out, 8))
