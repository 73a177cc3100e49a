"""Lossy checkpoints: named numbers are rounded, by what the checkpoint says, and everything else is as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests import harness
from tests.criu.test_checkpoints import checkpoint, manifest, restored
from tests.criu.test_client_dump import criu_or_skip
from tests.criu.test_increments import recovered
from tests.migration.moves import ended, info, succeeded
from xmigd.client import Refused
from xmigd.demo.node import Node, Program

pytestmark = pytest.mark.criu

Words = npt.NDArray[Any]
# Bits of mantissa, and the word of which a number has as many bits.
FORMATS: dict[str, tuple[int, Any]] = {
    "float16": (10, np.uint16), "bfloat16": (7, np.uint16), "float32": (23, np.uint32), "float64": (52, np.uint64),
}  # fmt: skip
COUNT = 1_500_000  # numbers of a buffer; several chunks, of which only some have named ones
THIRD = COUNT // 3


def reference(words: Words, mantissa: int, keep: int) -> Words:
    """To nearest, ties to even; special numbers and subnormal ones as they are."""
    bits = words.dtype.itemsize * 8
    one = words.dtype.type(1)
    sign, magnitude = words & (one << (bits - 1)), words & ~(one << (bits - 1))
    infinity = ((one << (bits - 1 - mantissa)) - one) << mantissa
    normal = (magnitude >= one << mantissa) & (magnitude < infinity)
    if keep >= mantissa:
        return words
    step = one << (mantissa - keep)
    down, rest = magnitude // step * step, magnitude % step
    up = np.where(normal, down + step, down)
    odd = (down // step) % 2 == 1
    nearest = np.where((rest > step // 2) | ((rest == step // 2) & odd), up, down)
    nearest = np.where(nearest >= infinity, down, nearest)
    return np.where(normal, sign | nearest, words).astype(words.dtype)


def values(words: Words, kind: str) -> npt.NDArray[Any]:
    if kind == "bfloat16":
        words, kind = words.astype(np.uint32) << 16, "float32"
    return words.view(kind).astype(np.float64)


def content(kind: str) -> Words:
    """Numbers of all sizes, each special one many times."""
    mantissa, word = FORMATS[kind]
    random = np.random.default_rng(len(kind) + mantissa)
    words = np.frombuffer(random.bytes(COUNT * np.dtype(word).itemsize), word).copy()
    one, bits = word(1), np.dtype(word).itemsize * 8
    infinity = ((one << (bits - 1 - mantissa)) - one) << mantissa
    special = [0, 1, (1 << mantissa) - 1, 1 << mantissa, int(infinity) - 1, int(infinity), int(infinity) + 1]
    for place, magnitude in enumerate(special):
        words[place::97] = magnitude
        words[place + 10 :: 97] = magnitude | 1 << (bits - 1)
    return words


class Numbers:
    """A program of `optimizer_state.py`, and what it wrote."""

    def __init__(self, node: Node, folder: Path, *, named: bool = True) -> None:
        self.folder = folder
        self.had = {kind: content(kind) for kind in FORMATS}
        self.had["weights"] = content("float32")
        for name, words in self.had.items():
            (folder / name).write_bytes(words.tobytes())
        if named:
            (folder / "named").touch()
        with (folder / "out").open("w") as out:
            command: list[str | Path] = [sys.executable, Path(__file__).parent / "optimizer_state.py", folder]
            self.program: Program = node.program(command, stdout=out, stderr=out, start_new_session=True)
        harness.wait_until((folder / "ready").exists, "its numbers are there")

    def read(self, number: int) -> dict[str, Words]:
        (self.folder / f"read.{number}").touch()
        harness.wait_until((self.folder / f"done.{number}").exists, "it has read them")
        return {
            name: np.frombuffer((self.folder / f"{name}.{number}").read_bytes(), words.dtype)
            for name, words in self.had.items()
        }

    def rounded(self, keep: int) -> dict[str, Words]:
        found = dict(self.had)
        for kind, (mantissa, _) in FORMATS.items():
            found[kind] = self.had[kind].copy()
            found[kind][THIRD : 2 * THIRD] = reference(self.had[kind][THIRD : 2 * THIRD], mantissa, keep)
        return found


def same(found: dict[str, Words], expected: dict[str, Words]) -> None:
    for name, words in expected.items():
        differ = np.flatnonzero(found[name] != words)
        assert differ.size == 0, f"{differ.size} numbers of {name} differ, first number {differ[0]}"


@pytest.fixture
def node(native_dir: Path, tmp_path: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip()) as node:
        yield node
        (tmp_path / "enough").touch()  # a restored program is nobody's child


@pytest.mark.parametrize("keep", [3, 8])
def test_named_numbers_are_rounded_and_nothing_else(node: Node, tmp_path: Path, keep: int) -> None:
    numbers = Numbers(node, tmp_path)
    checkpoint(numbers.program, keep_bits=keep)
    same(numbers.read(0), numbers.had)  # the job itself never has other numbers
    made = checkpoint(numbers.program, keep_bits=keep, stop=True)

    about = made["lossy"]
    assert about == node.client.get(f"/v1/checkpoints/{made['checkpoint']}")["lossy"]
    assert about == manifest(node, made).lossy.model_dump(mode="json")  # type: ignore[union-attr]
    assert about["keep_bits"] == keep
    assert 0 < about["stored_bytes"] < about["piece_bytes"]
    expected = numbers.rounded(keep)
    assert [each["type"] for each in about["rounded"]] == sorted(FORMATS)
    for each in about["rounded"]:
        kind = each["type"]
        before, after = numbers.had[kind][THIRD : 2 * THIRD], expected[kind][THIRD : 2 * THIRD]
        changed = before != after
        assert (each["ranges"], each["bytes"], each["changed"]) == (1, before.nbytes, int(changed.sum()))
        was = np.abs(values(before[changed], kind))
        errors = np.abs(values(after[changed], kind) - values(before[changed], kind))
        assert each["largest_relative"] == (errors / was).max(initial=0)
        assert each["largest_absolute"] == errors.max(initial=0)
        assert each["largest_relative"] <= 2.0**-keep

    succeeded(node, node.client.post(f"/v1/checkpoints/{made['checkpoint']}:verify", {}))
    result = restored(node, made)
    assert result["lossy"] == about
    same(numbers.read(1), expected)
    assert (tmp_path / "out").read_text() == ""


def test_an_exact_one_has_nothing_of_a_lossy_one(node: Node, tmp_path: Path) -> None:
    """Whatever comes before it, and though nobody has written in between."""
    numbers = Numbers(node, tmp_path)
    exact = checkpoint(numbers.program)
    assert exact["lossy"] is None
    assert manifest(node, exact).lossy is None
    first = checkpoint(numbers.program, keep_bits=3)
    assert first["copied_bytes"] < exact["copied_bytes"]  # the rest is an increment
    for made in (exact, first):
        node.client.delete(f"/v1/checkpoints/{made['checkpoint']}")
    checkpoint(numbers.program, keep_bits=5)
    made = checkpoint(numbers.program, stop=True)
    assert made["lossy"] is None
    assert restored(node, made)["lossy"] is None
    same(numbers.read(0), numbers.had)


def test_names_outlive_servers_and_checkpoints(node: Node, tmp_path: Path) -> None:
    numbers = Numbers(node, tmp_path)
    recovered(numbers.program)
    made = checkpoint(numbers.program, keep_bits=4, stop=True)
    restored(node, made)
    same(numbers.read(0), numbers.rounded(4))
    (tmp_path / "write").touch()
    harness.wait_until(lambda: not (tmp_path / "write").exists(), "it has written its numbers again")
    (process,) = (one for one in node.client.get("/v1/processes") if one["state"] == "running")
    operation = node.client.post("/v1/checkpoints", {"process": process["id"], "keep_bits": 3, "stop": True})
    restored(node, succeeded(node, operation)["result"])
    same(numbers.read(1), numbers.rounded(3))


def test_what_nobody_has_named_is_not_rounded(node: Node, tmp_path: Path) -> None:
    """Such a checkpoint is refused: it would be exact, though nobody wants that. The job goes on."""
    numbers = Numbers(node, tmp_path, named=False)
    operation = node.client.post("/v1/checkpoints", {"process": info(numbers.program)["id"], "keep_bits": 8})
    over = ended(node, operation)
    assert (over["state"], over["error"]["code"]) == ("failed", "nothing_named")
    assert node.client.get("/v1/checkpoints") == []
    same(numbers.read(0), numbers.had)
    for wrong in (0, 52, -1, 1.5):
        with pytest.raises(Refused) as refused:
            node.client.post("/v1/checkpoints", {"process": info(numbers.program)["id"], "keep_bits": wrong})
        assert refused.value.status == 422
