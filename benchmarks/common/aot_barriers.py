"""Barriers of a program of PTX between a wait for `wgmma` and the next write of its operands.

The wait orders the warp group that executes it. With more than four warps another group may still
read an operand, so its buffer may be written again only behind a barrier of the whole program.
Triton's own analysis took the wait for such a barrier up to 3.8 (triton#11056).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.common.aot_shared import Shared

WARPS_OF_A_GROUP = 4

_WRITE = re.compile(r"\b(?:cp\.async\.(?:c[ag]|bulk)\S*\.shared|st\.shared|stmatrix|st\.async)")
_BARRIER = re.compile(r"\bbar(?:rier)?(?:\.cta)?\.(?:red|sync)")
_PRODUCT = re.compile(r"\bwgmma\.mma_async")
_WAIT = re.compile(r"\bwgmma\.wait_group")
_LABEL = re.compile(r"^\s*([$%\w]+):\s*(?://.*)?$")
_BRANCH = re.compile(r"^\s*(@\S+\s+)?bra(?:\.uni)?\s+([$%\w]+)")
_END = re.compile(r"^\s*(?:ret|exit|trap);")


@dataclass(frozen=True, order=True)
class Hazard:
    """A write to an operand that another warp group may still read.

    Attributes:
        product: number of the line of PTX that reads the operand.
        write: number of the line that writes it, with no barrier behind the product's wait.
    """

    product: int
    write: int


def unordered_writes(ptx: str, warps: int) -> list[Hazard]:
    """Return all such writes, on every path: those back to a loop's head included."""
    if warps <= WARPS_OF_A_GROUP or not _PRODUCT.search(ptx):
        return []
    lines = ptx.splitlines()
    labels = {found[1]: at for at, line in enumerate(lines) if (found := _LABEL.match(line))}
    shared = Shared(ptx, warps)
    operands = {at: shared.operands(x) for at, x in enumerate(lines) if _PRODUCT.search(x)}
    written = {
        at: shared.written(x)
        for at, x in enumerate(lines)
        if _WRITE.search(x) and "mbarrier" not in x
    }
    hazards = set()
    for write, waited in _waited_for(lines, labels, set(operands), set(written)).items():
        for each in waited:
            if (operands[each] & written[write]).any():
                hazards.add(Hazard(each + 1, write + 1))
    return sorted(hazards)


def _waited_for(
    lines: list[str], labels: dict[str, int], products: set[int], writes: set[int]
) -> dict[int, set[int]]:
    """Return for each write the products waited for without a barrier since.

    The state on the way to a line is two sets of products, those in flight and those waited for;
    paths that meet have both sets' union.
    """
    state: dict[int, tuple[set[int], set[int]]] = {0: (set(), set())}
    pending, found = [0], {}
    while pending:
        at = pending.pop()
        flying, waited = (set(each) for each in state[at])
        line = lines[at]
        if at in writes:
            found[at] = set(waited)
        if at in products:
            flying.add(at)
        elif _WAIT.search(line):
            waited |= flying
            flying = set() if re.search(r"aligned\s+0;", line) else flying
        elif _BARRIER.search(line):
            waited = set()
        for following in _next(line, at, labels, len(lines)):
            before = state.get(following)
            if before is None or not (flying <= before[0] and waited <= before[1]):
                old = before or (set(), set())
                state[following] = (old[0] | flying, old[1] | waited)
                pending.append(following)
    return found


def _next(line: str, at: int, labels: dict[str, int], count: int) -> list[int]:
    if _END.match(line):
        return []
    following = [at + 1] if at + 1 < count else []
    if branch := _BRANCH.match(line):
        return [labels[branch[2]]] + (following if branch[1] else [])
    return following


_TENSOR_PRODUCT = re.compile(r"\btcgen05\.mma")
_HANDED = re.compile(r"\bst\.shared|\bstmatrix|cp\.async\.wait_group|tcgen05\.(?:ld|st)\.")


def unordered_products(ptx: str) -> list[Hazard]:
    """Return products of tensor memory that a thread issues before the others are ready.

    One thread issues a `tcgen05.mma`, for operands and sums that all threads have written or read.
    So a barrier of the program must stand between those accesses and it.
    """
    lines = ptx.splitlines()
    if not _TENSOR_PRODUCT.search(ptx):
        return []
    labels = {found[1]: at for at, line in enumerate(lines) if (found := _LABEL.match(line))}
    hazards = set()
    state: dict[int, set[int]] = {0: set()}
    pending = [0]
    while pending:
        at = pending.pop()
        line, before = lines[at], state[at]
        after = before
        if _TENSOR_PRODUCT.search(line):
            hazards |= {Hazard(at + 1, each + 1) for each in before}
        elif _HANDED.search(line):
            after = before | {at}
        elif _BARRIER.search(line):
            after = set()
        for following in _next(line, at, labels, len(lines)):
            if following not in state or not after <= state[following]:
                state[following] = state.get(following, set()) | after
                pending.append(following)
    return sorted(hazards)
