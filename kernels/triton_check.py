"""Check of the Triton kernels that serve: their results beside torch's, and their bits twice.

Compilers have faults: a version of Triton miscompiles one shape of kernel on one kind of GPU. So
the first call of each kernel and shape inside `checking` runs three times, on the arguments it is
called with: by torch on the host, then by Triton on a copy, then by Triton for its caller. When
the host has taken its time, the other kernels run twice and are compared with themselves alone.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import compress
from typing import Any

import torch

from vlm_serve.kernels.dispatch import Op, plain_torch

TOLERANCES = {torch.float32: 2e-3, torch.float8_e4m3fn: 0.15}
"""Largest difference by type, relative to the largest value of the host's result."""
TOLERANCE_16_BITS = 3e-2
SHORT = (torch.bfloat16, torch.float16)
CODE_TOLERANCE = 1.0
"""Codes of 8 bits may be rounded to the next one."""
SECONDS = 8.0
"""The time after which no other kernel is compared with the host. Compiling does not count: serving
needs it too."""
DIGESTED_BYTES = 16 << 20
"""Larger results do not enter the digest."""
WEIGHT_BYTES = 64 << 20
"""Larger arguments are weights: the pools of a check are smaller. No kernel writes weights, so they
are neither copied on the device (the head of a 27B has 2.5 GB) nor compared."""

_log = logging.getLogger(__name__)
_HOST = torch.device("cpu")
_faults: ContextVar[Faults | None] = ContextVar("kernels to check", default=None)


@dataclasses.dataclass
class Faults:
    """What the checks have found.

    Attributes:
        failures: a sentence for each wrong kernel.
        checked: kernels by name and shapes.
        unchecked: names of kernels that were not compared with the host, for want of time.
        spent: seconds that the host has computed, copied and compared.
        apart: largest difference by kernel and type with its limit, both relative to the host's
            largest value.
    """

    failures: list[str] = dataclasses.field(default_factory=list)
    checked: set[tuple[Any, ...]] = dataclasses.field(default_factory=set)
    unchecked: set[str] = dataclasses.field(default_factory=set)
    spent: float = 0.0
    apart: dict[tuple[str, torch.dtype], tuple[float, float]] = dataclasses.field(
        default_factory=dict
    )
    _bits: hashlib.blake2b = dataclasses.field(
        default_factory=lambda: hashlib.blake2b(digest_size=4)
    )

    @property
    def digest(self) -> str:
        """Digest of the bits of all results so far: 8 hexadecimal digits."""
        return self._bits.copy().hexdigest()

    def note(self, name: str, results: list[torch.Tensor]) -> None:
        """Add a kernel's results, which it gave twice, to the digest."""
        self._bits.update(name.encode())
        for tensor in results:
            if tensor.numel() and tensor.nbytes <= DIGESTED_BYTES:
                flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
                self._bits.update(flat.to(_HOST).numpy().tobytes())

    def compare(self, name: str, mine: torch.Tensor, theirs: torch.Tensor, *, short: bool) -> None:
        """Note how far a kernel's result lies from the host's.

        Args:
            name: of the kernel.
            mine: its result, on any device.
            theirs: the host's.
            short: whether operands have 16 bits. A float32 sum of their products is as rough as
                they are.
        """
        apart, key = difference(mine, theirs), (name, mine.dtype)
        limit = tolerance(mine.dtype)
        if short:
            limit = max(limit, TOLERANCE_16_BITS)
        self.apart[key] = max(self.apart.get(key, (0.0, limit)), (apart, limit))
        if apart > limit:
            self.failures.append(f"{name} differs from torch by {apart:.2g} of its largest value")


@contextmanager
def checking() -> Iterator[Faults]:
    """Check each kernel and shape that this thread launches inside the block, at its first call."""
    faults = Faults()
    token = _faults.set(faults)
    before = {op: op.replace_triton(_Checked(op).run) for op in Op.with_triton()}
    try:
        yield faults
    finally:
        _faults.reset(token)
        for op, implementation in before.items():
            op.replace_triton(implementation)


class _Checked:
    """An op's Triton implementation with the check around it."""

    def __init__(self, op: Op[..., Any]) -> None:
        self._op, self._triton = op, op.load_triton()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel for its caller; on another thread, do nothing else."""
        faults = _faults.get()
        key = (self._op.triton, _shapes(args), _shapes(kwargs))
        if faults is None or key in faults.checked:
            return self._triton(*args, **kwargs)
        faults.checked.add(key)
        name = str(self._op.triton).partition(":")[2]
        try:
            return self._compared(name, faults, args, kwargs)
        except RuntimeError as error:
            # A GPU reports an illegal access at the next copy, and then for ever.
            faults.failures.append(f"{name} failed: {str(error).partition(chr(10))[0]}")
            raise

    def _compared(
        self, name: str, faults: Faults, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        begin = time.perf_counter()
        host = expected = None
        if faults.spent < SECONDS:
            host = _mapped((args, kwargs), _to_host)
            again = _mapped((args, kwargs), _copied)
            expected = self._expected(name, host)
        else:
            faults.unchecked.add(name)
            again = _mapped((args, kwargs), _copied)
        faults.spent += time.perf_counter() - begin
        first = self._triton(*again[0], **again[1])
        result = self._triton(*args, **kwargs)
        mine = list(_tensors((result, args, kwargs)))
        repeated = list(_tensors((first, again)))
        changed = [tensor is not other for tensor, other in zip(mine, repeated, strict=True)]
        mine, repeated = list(compress(mine, changed)), list(compress(repeated, changed))
        if not all(map(_same_bits, mine, repeated)):
            faults.failures.append(f"{name} gives other bits in a second run")
            return result
        begin = time.perf_counter()
        faults.note(name, mine)
        if expected is not None:
            short = any(tensor.dtype in SHORT for tensor in _tensors((args, kwargs)))
            theirs = compress(_tensors((*expected, host)), changed)
            for tensor, other in zip(mine, theirs, strict=True):
                faults.compare(name, tensor, other, short=short)
        faults.spent += time.perf_counter() - begin
        return result

    def _expected(self, name: str, arguments: Any) -> tuple[Any] | None:
        """Return torch's results; None if the host cannot compute with these arguments."""
        try:
            with plain_torch():
                return (self._op.torch(*arguments[0], **arguments[1]),)
        except Exception as error:
            _log.warning("%s was not checked: %s", name, error)
            return None


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference that results of a type may have."""
    return CODE_TOLERANCE if dtype == torch.uint8 else TOLERANCES.get(dtype, TOLERANCE_16_BITS)


def difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return how far a result lies from the host's: relative to its largest value, for codes of 8
    bits in codes. Experts' numbers are not compared: equal probabilities may be in any order."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return float("inf")
    if not mine.numel() or mine.dtype in (torch.int64, torch.int32):
        return 0.0
    ours, other = mine.to(_HOST).double(), theirs.double()
    same = (ours == other) | (ours.isnan() & other.isnan())
    apart = torch.where(same, 0.0, (ours - other).abs()).nan_to_num(nan=float("inf"))
    if mine.dtype == torch.uint8:
        return float(apart.max())
    scale = float(other.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return float(apart.max()) / (scale or 1.0)


def _same_bits(mine: torch.Tensor, other: torch.Tensor) -> bool:
    if mine.shape != other.shape or not mine.numel():
        return mine.shape == other.shape
    return torch.equal(*(part.contiguous().view(torch.uint8) for part in (mine, other)))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.nbytes > WEIGHT_BYTES else tensor.clone()


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(_HOST, copy=True)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy arguments with all their tensors changed. What a step has derived from its metadata is
    made again."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(element, change) for element in value))
    if isinstance(value, tuple | list):
        return type(value)(_mapped(element, change) for element in value)
    if isinstance(value, dict):
        return {name: _mapped(element, change) for name, element in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    fresh = copy.copy(value)
    for name, held in fields.items():
        derived = name in ("tensors", "plans", "checked")
        object.__setattr__(fresh, name, type(held)() if derived else _mapped(held, change))
    return fresh


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of results and arguments in their order, without derived ones."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _tensors(element)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name not in ("tensors", "plans", "checked"):
                yield from _tensors(getattr(value, field.name))


def _shapes(value: Any) -> tuple[Any, ...]:
    """Return types and shapes of all tensors, and the length of each step's metadata."""
    parts = [(tensor.dtype, tuple(tensor.shape)) for tensor in _tensors(value)]
    return tuple(parts)
