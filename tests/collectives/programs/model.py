"""What collectives are to give, computed apart from them: in the order of the ranks, each step rounded to the type."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
FLOAT16, BFLOAT16, E4M3, E5M2 = 6, 9, 10, 11
SUM, PRODUCT, MAX, MIN, AVERAGE, SCALED = range(6)
PLAIN = {0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 6: "f2", 7: "f4", 8: "f8"}


def storage(kind: int) -> str:
    """The numpy type that an array of this type is kept in; of those that numpy does not know, its bits."""
    return PLAIN.get(kind, "u2" if kind == BFLOAT16 else "u1")


def _eight(kind: int) -> Array:
    """The values of the codes 0 to 255."""
    exponent_bits = 4 if kind == E4M3 else 5
    fraction_bits, bias = 7 - exponent_bits, (1 << (exponent_bits - 1)) - 1
    values = np.empty(256, np.float32)
    for code in range(256):
        exponent, fraction = code >> fraction_bits & ((1 << exponent_bits) - 1), code & ((1 << fraction_bits) - 1)
        if kind == E4M3 and code & 0x7F == 0x7F:
            value = float("nan")
        elif kind == E5M2 and exponent == 31:
            value = float("nan") if fraction else float("inf")
        elif exponent == 0:
            value = fraction * 2.0 ** (1 - bias - fraction_bits)
        else:
            value = (1 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias)
        values[code] = -value if code & 0x80 else value
    return values


EIGHT = {E4M3: _eight(E4M3), E5M2: _eight(E5M2)}
LARGEST = {E4M3: 0x7E, E5M2: 0x7B}


def widen(kind: int, data: Array) -> Array:
    if kind == BFLOAT16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if kind in EIGHT:
        return EIGHT[kind][data]
    return data.astype(np.float32) if kind == FLOAT16 else data


def narrow(kind: int, data: Array) -> Array:
    if kind == BFLOAT16:
        bits = data.astype(np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    if kind in EIGHT:
        finite = EIGHT[kind][: LARGEST[kind] + 1].astype(np.float64)
        sizes = np.abs(data.astype(np.float64))
        above = np.searchsorted(finite, sizes).clip(1, LARGEST[kind])
        to_above, to_below = np.abs(finite[above] - sizes), np.abs(finite[above - 1] - sizes)
        # As far from both: the even one.
        takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
        return (np.where(takes_above, above, above - 1) | np.where(np.signbit(data), 0x80, 0)).astype(np.uint8)
    return data.astype(storage(kind))


def step(kind: int, op: int, a: Array, b: Array) -> Array:
    x, y = widen(kind, a), widen(kind, b)
    with np.errstate(all="ignore"):
        if op == PRODUCT:
            return narrow(kind, x * y)
        if op in (MAX, MIN):
            return narrow(kind, np.fmax(x, y) if op == MAX else np.fmin(x, y))
        return narrow(kind, x + y)


def scaled(kind: int, data: Array, scalar: Array) -> Array:
    with np.errstate(all="ignore"):
        return narrow(kind, widen(kind, data) * widen(kind, scalar)[0])


def reduced(kind: int, op: int, inputs: list[Array], scalars: list[Array] | None = None) -> Array:
    """`scalars`: of each rank, for SCALED."""
    ranks = len(inputs)
    floating = kind >= FLOAT16
    if op == SCALED:
        assert scalars is not None
        inputs = [scaled(kind, one, scalar) for one, scalar in zip(inputs, scalars, strict=True)]
    elif op == AVERAGE and floating:
        share = np.array([1.0 / ranks], np.float64 if kind == 8 else np.float32)
        inputs = [scaled(kind, one, narrow(kind, share)) for one in inputs]
    total = inputs[0]
    for other in inputs[1:]:
        total = step(kind, op, total, other)
    if op == AVERAGE and not floating:
        wide = [int(x) for x in total]
        total = np.array([abs(x) // ranks * (1 if x >= 0 else -1) for x in wide], storage(kind))
    return total


def some(kind: int, count: int, seed: int) -> Array:
    """Values that are no special case in any of the types; where numbers wrap, of the whole range."""
    chance = np.random.default_rng(seed)
    if kind in PLAIN and PLAIN[kind][0] in "iu":
        info = np.iinfo(PLAIN[kind])
        return chance.integers(info.min, info.max, count, dtype=PLAIN[kind], endpoint=True)
    values = chance.uniform(-3, 3, count)
    return narrow(kind, values.astype(np.float64 if kind == 8 else np.float32))
