"""Names a program's optimizer state for lossy checkpoints (docs/decisions/0096). `xmigctl run
--lossy-optimizer-state` puts this folder on PYTHONPATH, so the program's Python imports this module when it starts.

It imports nothing of xMIG, and PyTorch only watches: once the program has imported its optimizers, each step of one is
followed by a list of the state that it has, for the shim. Only entries with names that the user gave are in there.
Nothing in here may change what the program does: what fails is printed once, and the state stays exact.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any

KEYS = [key for key in os.environ.get("XMIG_LOSSY_OPTIMIZER_STATE", "").split(",") if key]
WATCHED = "torch.optim.optimizer"
# As shim/journal/numbers.h has them.
TYPES = {"torch.float16": 0, "torch.bfloat16": 1, "torch.float32": 2, "torch.float64": 3}

Range = tuple[int, int, int]  # address, bytes, type

_printed: set[str] = set()


def say(text: str) -> None:
    """Once each."""
    if text not in _printed:
        _printed.add(text)
        print(f"xMIG: {text}", file=sys.stderr, flush=True)


class Watcher:
    """A finder of modules, which finds what the others find."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _then(spec.loader, attach)
                return spec
        return None


def _then(loader: Any, work: Any) -> None:
    """`work` is called with the module that this loader has executed."""
    execute = loader.exec_module

    def executed(module: Any) -> None:
        execute(module)
        work(module)

    loader.exec_module = executed


def attach(module: Any) -> None:
    """To all optimizers. `module`: torch.optim.optimizer."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        return say("this PyTorch has no hooks for all optimizers (2.0 has): no optimizer state is named")
    register(Naming())


class Naming:
    """The hook. Of each optimizer it has what was in its list the last time."""

    _torchdynamo_disable = True  # it is not a part of a compiled step

    def __init__(self) -> None:
        self._before: dict[int, tuple[list[Range], Any]] = {}  # by the optimizer's id
        self._shim: Any = None
        self._failed = False

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._failed:
            return
        try:
            self._name(optimizer)
        except Exception as error:
            self._failed = True
            say(f"optimizer state is not named any more: {type(error).__name__}: {error}")

    def _name(self, optimizer: Any) -> None:
        tensors = state_of(optimizer)  # kept until they are named: another thread may change the state
        found = [(one.data_ptr(), one.numel() * one.element_size(), TYPES[str(one.dtype)]) for one in tensors]
        before, arrays = self._before.get(id(optimizer), ([], None))
        if not found and not before:
            return
        self._shim = self._shim or shim()
        if found != before:
            # What was taken out of the state may be anything now, though its memory was not given back.
            self._forget(set(before).difference(found))
            arrays = _arrays(found)
            if id(optimizer) not in self._before:
                weakref.finalize(optimizer, self._gone, id(optimizer)).atexit = False
            self._before[id(optimizer)] = found, arrays
        # Each time: memory that came back to the allocator meanwhile is not named any more, even at the same address.
        named = self._shim.xmigNameNumbers(*arrays, len(found), 1)
        if named != len(found):
            say(
                f"{len(found) - named} of {len(found)} tensors of optimizer state stay exact: PyTorch does not report "
                "when their memory is given back (before 2.10, in a private pool, or with XMIG_CACHED_BLOCKS=keep)"
            )

    def _gone(self, optimizer: int) -> None:
        """Somebody else may still have its tensors."""
        before, _ = self._before.pop(optimizer)
        self._forget(before)

    def _forget(self, ranges: Iterable[Range]) -> None:
        for address, size, _ in ranges:
            self._shim.xmigForgetNumbers(address, size)


def state_of(optimizer: Any) -> list[Any]:
    """Tensors whose memory may be named: of floating-point numbers without gaps, and in no parameter's storage."""
    held = {_storage(_local(one)) for group in optimizer.param_groups for one in group["params"]}
    found = []
    for entries in optimizer.state.values():
        for key in KEYS:
            tensor = _local(entries.get(key))
            if is_suitable(tensor) and _storage(tensor) not in held:
                found.append(tensor)
    return found


def is_suitable(tensor: Any) -> bool:
    if str(getattr(tensor, "dtype", None)) not in TYPES or not on_device(tensor) or tensor.numel() == 0:
        return False
    # Its dimensions may be in another order, but each number lies behind the one before, and has a place of its own.
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def on_device(tensor: Any) -> bool:
    return bool(tensor.is_cuda)


def _local(tensor: Any) -> Any:
    """Of a DTensor, the part that this process has."""
    return getattr(tensor, "_local_tensor", tensor)


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _arrays(found: list[Range]) -> tuple[Any, Any, Any]:
    return (
        (ctypes.c_uint64 * len(found))(*(address for address, _, _ in found)),
        (ctypes.c_uint64 * len(found))(*(size for _, size, _ in found)),
        (ctypes.c_uint32 * len(found))(*(number_type for _, _, number_type in found)),
    )


def shim() -> Any:
    """Its library. Raises OSError, AttributeError: the driver is not the shim."""
    library = ctypes.CDLL("libcuda.so.1")
    name, forget = library.xmigNameNumbers, library.xmigForgetNumbers
    name.restype = ctypes.c_size_t
    name.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    forget.restype, forget.argtypes = None, [ctypes.c_uint64, ctypes.c_uint64]
    return library


def _import_next() -> None:
    """The sitecustomize that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.modules["xmig_naming"] = sys.modules[__name__]  # the other one gets this one's name
    if KEYS:
        sys.meta_path.insert(0, Watcher())
    _import_next()
