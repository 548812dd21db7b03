"""Read a kernel's intermediate code (TTGIR), which still has its loops, buffers and layouts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Loop:
    """A loop that copies tiles to shared memory ahead of their use.

    Attributes:
        buffers: tiles kept of the operand with the fewest.
        ahead: copies left in flight by the wait that leaves the fewest; 0 means that a tile is
            copied only when it is needed.
    """

    buffers: int
    ahead: int


@dataclass
class _Region:
    """Code between braces: whether it is a loop, where it copies to, and how deep it waits."""

    loop: bool
    targets: list[str] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    around: bool = False


_INDEX = re.compile(r"(%\S+) = ttg\.memdesc_(?:index|subview) .*: !ttg\.memdesc<(\d+)x\d+x")
_COPY = re.compile(r"ttg\.async_copy_global_to_local %[^,\s]+, (%[^,\s]+)")
_WAIT = re.compile(r"ttg\.async_wait .*num = (\d+)")


def pipelined_loops(ttgir: str) -> list[Loop]:
    """Return every loop of a program that copies to shared memory, in their order of ending.

    A loop around such a loop is left out: the copies there fill the inner one's buffers first, and
    its wait of zero empties them.
    """
    depth_of = dict(_INDEX.findall(ttgir))
    regions: list[_Region] = []
    found = []
    for line in ttgir.splitlines():
        text = line.split(" loc(")[0].strip()
        if text.startswith("}") and regions:
            region = regions.pop()
            if region.loop and region.targets and not region.around:
                buffers = min(int(depth_of.get(name, 1)) for name in region.targets)
                found.append(Loop(buffers, min(region.waits, default=0)))
                region.around = True
            elif regions and not region.loop:
                regions[-1].targets += region.targets
                regions[-1].waits += region.waits
            if regions:
                regions[-1].around |= region.around
        if text.endswith("{"):
            regions.append(_Region("scf.for" in text or "scf.while" in text))
        elif regions:
            regions[-1].targets += _COPY.findall(text)
            regions[-1].waits += map(int, _WAIT.findall(text))
    return found


def turned_products(ttgir: str) -> list[str]:
    """Return the transpositions of a product's own result, which some compilers get wrong."""
    kinds = "|".join(re.findall(r"^(#\w+) = #ttg\.nvidia_mma", ttgir, re.MULTILINE))
    if not kinds:
        return []
    pattern = rf"tt\.trans .*: tensor<[^>]*, (?:{kinds})> "
    return [line.strip() for line in ttgir.splitlines() if re.search(pattern, line)]
