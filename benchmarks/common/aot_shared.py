"""Which bytes of shared memory an instruction of PTX reads or writes, over all threads.

Addresses of tiles follow from the thread's number and constants. A pipelined loop adds the number
of a buffer, which it carries from one iteration to the next and which has few values. So an address
is computed here for every thread and every such number. What depends on anything else is unknown,
and counts as all of shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

GRANULE = 16
"""Bytes that a bit of a mask stands for: tiles begin and end at multiples of it."""
MASK_BYTES = 256 << 10
MOST_VALUES = 64
"""Numbers of buffers, or combinations of them, that are followed."""

_DEFINITION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+(%\w+)(?:\|%\w+)?\s*,\s*([^;]*);")
_REGISTER = re.compile(r"%\w+(?:\.\w)?")
_NO_RESULT = ("st", "cp", "bra", "red", "wgmma", "stmatrix", "fence", "bar", "mbarrier")


def _signed(x: Vector) -> Vector:
    return ((x + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def _unsigned(x: Vector) -> Vector:
    return x & 0xFFFFFFFF


_BINARY: dict[str, Callable[[Vector, Vector], Vector]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << np.minimum(b, 63),
    "min": np.minimum,
    "max": np.maximum,
}
_COMPARE: dict[str, Callable[[Vector, Vector], Mask]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


class Shared:
    """Shared memory as a program of PTX addresses it.

    Args:
        ptx: the program.
        warps: of it.
    """

    def __init__(self, ptx: str, warps: int) -> None:
        self._threads = np.arange(32 * warps)
        self._made: dict[str, list[tuple[str, list[str]]]] = {}
        for line in ptx.splitlines():
            found = _DEFINITION.match(line)
            if found and found[1].split(".")[0] not in _NO_RESULT:
                arguments = [each.strip() for each in found[3].split(",")]
                self._made.setdefault(found[2], []).append((found[1], arguments))
        self._settled: dict[str, list[Vector] | None] = {}

    def written(self, line: str) -> Mask:
        """Return the bytes that a store or a copy to shared memory writes."""
        place = re.search(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\w+)\s*)?\]", line)
        assert place, line
        width = 16
        if kind := re.search(r"st\.shared\S*?(?:\.v(\d))?\.[bfsu](\d+)\b", line):
            width = int(kind[1] or 1) * int(kind[2]) // 8
        addresses = self._values(place[1])
        if addresses is None:
            return np.ones(MASK_BYTES // GRANULE, np.bool_)
        mask = np.zeros(MASK_BYTES // GRANULE, np.bool_)
        for each in addresses:
            first = each + int(place[2] or "0", 0)
            for byte in range(0, width, min(width, GRANULE)):
                _mark(mask, (first + byte) // GRANULE)
        return mask

    def operands(self, line: str) -> Mask:
        """Return the bytes that a `wgmma` reads through its descriptors."""
        shape = re.search(r"\.m(\d+)n(\d+)k(\d+)\.\w+\.(\w+)\.", line)
        assert shape, line
        pieces = [each.strip() for each in re.split(r",(?![^{]*\})", line.split(";")[0])]
        first = next(at for at, each in enumerate(pieces) if each.endswith("}")) + 1
        sides = [(int(shape[1]), pieces[first]), (int(shape[2]), pieces[first + 1])]
        size = {"bf16": 2, "f16": 2, "tf32": 4}.get(shape[4], 1)
        mask = np.zeros(MASK_BYTES // GRANULE, np.bool_)
        for rows, register in sides:
            if not register.startswith("{"):
                mask |= self._tile(register, rows, int(shape[3]), size)
        return mask

    def _tile(self, descriptor: str, rows: int, depth: int, size: int) -> Mask:
        """Mark all that a descriptor's tile may take, in either order of its dimensions."""
        found = self._values(descriptor)
        if found is None:
            return np.ones(MASK_BYTES // GRANULE, np.bool_)
        mask = np.zeros(MASK_BYTES // GRANULE, np.bool_)
        for value in {int(each) for values in found for each in values}:
            begin, strides = (value & 0x3FFF) << 4, [(value >> at & 0x3FFF) << 4 for at in (16, 32)]
            wide = {1: 128, 2: 64, 3: 32}.get(value >> 62 & 3, 16)
            atoms = max(rows // 8, -(-rows * size // wide) + -(-depth // 8) - 1)
            atom = 8 * wide
            end = begin - begin % atom + (atoms - 1) * max(strides) + atom
            mask[begin // GRANULE : end // GRANULE] = True
        return mask

    def _values(self, register: str) -> list[Vector] | None:
        """Return each thread's value, for all numbers of buffers; None if that is unknown."""
        leaves = sorted(self._leaves(register, set()))
        ranges = [self._all_values(leaf) for leaf in leaves]
        known = [each for each in ranges if each is not None]
        if len(known) < len(ranges) or np.prod([len(each) for each in known]) > MOST_VALUES:
            return None
        found = []
        for values in product(*known):
            value = self._compute(register, dict(zip(leaves, values, strict=True)))
            if value is None:
                return None
            found.append(value)
        return found

    def _leaves(self, register: str, seen: set[str]) -> set[str]:
        """Return the registers with several definitions that a value depends on."""
        if register in seen:
            return set()
        seen.add(register)
        made = self._made.get(register, [])
        if len(made) > 1:
            return {register}
        inner = [name for _, arguments in made for each in arguments for name in _names(each)]
        return set().union(*(self._leaves(name, seen) for name in inner))

    def _all_values(self, leaf: str) -> list[Vector] | None:
        """Return the values that a loop gives a register, found by running it until none is new."""
        if leaf in self._settled:
            return self._settled[leaf]
        self._settled[leaf] = None  # Of a loop that runs through another register.
        values: dict[bytes, Vector] = {}
        pending: list[Vector | None] = [None]
        while pending:
            before = pending.pop()
            for operation, arguments in self._made[leaf]:
                inner = set().union(
                    *(self._leaves(name, set()) for each in arguments for name in _names(each))
                )
                if inner - {leaf} or len(values) > MOST_VALUES:
                    return None
                if bool(inner) != (before is not None):
                    continue
                made = self._apply(operation, arguments, {} if before is None else {leaf: before})
                if made is None:
                    return None
                if made.tobytes() not in values:
                    values[made.tobytes()] = made
                    pending.append(made)
        self._settled[leaf] = list(values.values())
        return self._settled[leaf]

    def _compute(self, register: str, known: dict[str, Vector]) -> Vector | None:
        if register in known:
            return known[register]
        if re.fullmatch(r"-?(?:0x[0-9a-fA-F]+|\d+)", register):
            return np.full_like(self._threads, _number(register))
        if register == "%tid.x":
            return self._threads
        if register == "global_smem":
            return np.zeros_like(self._threads)
        made = self._made.get(register, [])
        if len(made) != 1:
            return None
        value = self._apply(*made[0], known)
        if value is not None:
            known[register] = value
        return value

    def _apply(
        self, operation: str, arguments: list[str], known: dict[str, Vector]
    ) -> Vector | None:
        """Compute one instruction for all threads; None if it is none of addresses."""
        name, *kinds = operation.split(".")
        given = []
        for each in arguments:
            value = self._compute(each, known)
            if value is None:
                return None
            given.append(value)
        wide = any(kind in ("b64", "s64", "u64") for kind in kinds)
        signed = any(kind.startswith("s") and kind[1:].isdigit() for kind in kinds)
        result = _computed(name, kinds, given, signed)
        if result is None or wide or "pred" in kinds or name == "setp":
            return result
        return _signed(result) if signed else _unsigned(result)


def _computed(name: str, kinds: list[str], given: list[Vector], signed: bool) -> Vector | None:
    if name in ("mov", "cvt", "cvta"):
        return given[0]
    if name in _BINARY and "hi" not in kinds and "wide" not in kinds:
        return _BINARY[name](given[0], given[1])
    if name == "shr":
        return (_signed(given[0]) if signed else given[0]) >> given[1]
    if name == "mad" and "lo" in kinds:
        return given[0] * given[1] + given[2]
    if name == "not":
        return 1 - given[0] if "pred" in kinds else ~given[0]
    if name == "bfe":
        return given[0] >> given[1] & ((1 << given[2]) - 1)
    if name == "selp":
        return np.where(given[2] != 0, given[0], given[1])
    if name == "setp" and kinds[0] in _COMPARE:
        both = [_signed(each) for each in given] if signed else given
        result: Vector = _COMPARE[kinds[0]](both[0], both[1]).astype(np.int64)
        return result
    if name == "shfl" and "idx" in kinds:
        lanes = np.arange(given[0].size) // 32 * 32 + given[1] % 32
        shuffled: Vector = given[0][lanes]
        return shuffled
    return None


def _names(argument: str) -> list[str]:
    return [argument] if argument.startswith("%") else _REGISTER.findall(argument)


def _number(text: str) -> int:
    value = int(text, 0)
    return value - (1 << 64) if value >= 1 << 63 else value


def _mark(mask: Mask, places: Vector) -> None:
    inside = places[(places >= 0) & (places < mask.size)]
    mask[inside] = True
