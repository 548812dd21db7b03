"""Known faults of Triton, and of the assembler that it brings, that our kernels could meet.

An entry is an architecture, a range of Triton versions and a construct, so no version alone is a
reason to refuse a GPU. Where the kernel with that construct has another form, which is compiled
right, the entry names it and the kernel takes it. Where it has none, the check at start
(`triton_check`) decides. `benchmarks/aot.py --check` reads what can be seen in machine code:
barriers, and transposed results of products.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of some Triton versions on some GPUs.

    Attributes:
        op: the Triton function with the construct.
        architectures: compute capabilities.
        since: the first version with the fault.
        before: the first version without it; "" if none is known.
        construct: what is compiled wrongly, and what comes of it; a clause.
        source: public reports.
        instead: the form that the op takes there; "" if it has no other.
    """

    op: str
    architectures: tuple[int, ...]
    since: str
    before: str
    construct: str
    source: str
    instead: str = ""

    def holds(self, architecture: int, triton: str) -> bool:
        """Return True if a GPU and a version of Triton have this fault."""
        unfixed = self.before == "" or _parts(triton) < _parts(self.before)
        return (
            architecture in self.architectures and _parts(self.since) <= _parts(triton) and unfixed
        )

    def sentence(self, architecture: int, triton: str) -> str:
        """Return what is done about it, and why."""
        where = f"with Triton {triton} on sm_{architecture} {self.construct} ({self.source})"
        if self.instead:
            return f"{self.op} has {self.instead}: {where}"
        remedy = f", Triton {self.before} or newer has no such fault" if self.before else ""
        return f"{self.op} must pass the check at start: {where}{remedy}"


NARROW = "16 columns and 2 warps"
FAULTS = (
    Fault(
        "chunk_gated_delta",
        (100, 101),
        "3.4.0",
        "3.7.0",
        "products of 32 columns at 4 warps, in a loop whose end is read from memory, give other "
        "bits from run to run",
        "triton#9871",
        NARROW,
    ),
    Fault(
        "chunk_gated_delta",
        (103,),
        "3.4.0",
        "3.8.0",
        "products of a recurrence at 4 or 8 warps give other bits from run to run",
        "triton#10590",
        NARROW,
    ),
    Fault(
        "chunk_gated_delta",
        (90,),
        "3.6.0",
        "3.8.0",
        "several products of 32 columns at 4 warps may read shared memory out of bounds",
        "triton#11366, flash-linear-attention#984",
    ),
    Fault(
        "attention_prefill",
        (90,),
        "3.4.0",
        "",
        "the assembler may reuse registers of a product's operand before it is read",
        "triton#11781",
    ),
)
"""Not here are faults that none of our kernels can have. Triton 3.4 to 3.7.0 miscompiles the
transposed result of a product as an operand on sm_90 (flash-linear-attention#640), and up to 3.8 a
wait for a product is taken for a barrier of more than four warps (triton#11056): `aot.py --check`
finds neither in 3.6.0 and 3.7.1."""


@cache
def triton_version() -> str:
    """Return the version of the installed Triton; "none" without one."""
    for name in ("triton", "pytorch-triton-rocm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


@cache
def faults_at(architecture: int, triton: str) -> tuple[Fault, ...]:
    """Return the faults of a GPU (its compute capability, 90) and a version of Triton."""
    return tuple(fault for fault in FAULTS if fault.holds(architecture, triton))


def form_of(op: str, architecture: int, triton: str) -> str:
    """Return the form that an op must take to be compiled right; "" for its usual one."""
    forms = (fault.instead for fault in faults_at(architecture, triton) if fault.op == op)
    return next(filter(None, forms), "")


def forms_at(architecture: int, triton: str) -> Iterator[str]:
    """Yield each op with an unusual form and that form; results have other bits there."""
    for op in sorted({fault.op for fault in faults_at(architecture, triton)}):
        if form := form_of(op, architecture, triton):
            yield f"{op} with {form}"


def _parts(text: str) -> tuple[int, ...]:
    """Return a version's numbers, without what follows them ("3.7.1+git12" is 3.7.1)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
