"""The check at start finds kernels with wrong results, and those that change from run to run."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from triton_case import DEVICE, kernels, randn

from vlm_serve.kernels import triton_check
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.norms import rms_norm
from vlm_serve.kernels.triton_check import (
    TOLERANCES,
    Faults,
    checking,
    difference,
    tolerance,
)


def norm(rows: int = 3) -> torch.Tensor:
    return rms_norm(randn(rows, 64), randn(64), 1e-6)


def with_fault(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    """Let the Triton kernel of rms_norm return what `fault` makes of its result."""
    from vlm_serve.kernels.norms import triton as module

    inner = module.rms_norm
    monkeypatch.setattr(module, "rms_norm", lambda *args: fault(inner(*args)))
    for op in Op.with_triton():
        monkeypatch.setattr(op, "_loaded", None)


def test_right_kernels_are_checked_once_for_each_shape() -> None:
    with kernels(), checking() as faults:
        expected = norm()
        assert torch.equal(norm(), expected)
        norm(5)
    assert not faults.failures
    assert len(faults.checked) == 2


def test_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy of a large head would not fit beside it."""
    from vlm_serve.kernels.norms import triton as module

    given: list[tuple[int, ...]] = []
    inner = module.rms_norm

    def watched(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        given.append((x.data_ptr(), weight.data_ptr()))
        return inner(x, weight, eps)

    monkeypatch.setattr(module, "rms_norm", watched)
    for op in Op.with_triton():
        monkeypatch.setattr(op, "_loaded", None)
    compared: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        Faults, "compare", lambda self, name, mine, theirs, *, short: compared.append(mine.shape)
    )
    monkeypatch.setattr(triton_check, "WEIGHT_BYTES", 1000)
    small, large = randn(3, 64), randn(256)
    with kernels(), checking() as faults:
        rms_norm(small, randn(64), 1e-6)
        rms_norm(randn(3, 256)[:1], large, 1e-6)
    (rows, weight), (again, same), *others = given
    assert rows != again and weight != same  # 768 and 256 bytes
    assert [each[1] for each in others] == [large.data_ptr()] * 2  # 1 024 bytes
    assert compared == [(3, 64), (3, 64), (64,), (1, 256)]
    assert not faults.failures


def test_a_wrong_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(out: torch.Tensor) -> torch.Tensor:
        out[1] *= 1.05
        return out

    with_fault(monkeypatch, fault)
    with kernels(), checking() as faults:
        norm()
    assert len(faults.failures) == 1
    assert faults.failures[0].startswith("rms_norm differs from torch by 0.0")


def test_bits_that_change_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fault(out: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return out * (1.0 + 1e-6 * len(calls))

    with_fault(monkeypatch, fault)
    with kernels(), checking() as faults:
        norm()
    assert faults.failures == ["rms_norm gives other bits in a second run"]


def test_what_the_host_cannot_compute_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("not implemented for 'Half'")

    (op,) = [op for op in Op.with_triton() if str(op.triton).endswith(":rms_norm")]
    monkeypatch.setattr(op, "torch", refuse)
    with kernels(), checking() as faults:
        norm()
    assert not faults.failures
    assert caplog.messages == ["rms_norm was not checked: not implemented for 'Half'"]


def test_only_the_thread_that_asks_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with_fault(monkeypatch, lambda out: out * 2)
    with checking() as faults:

        def other() -> None:
            with kernels():
                norm()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert not faults.checked


def test_kernels_are_as_before_behind_the_check() -> None:
    with kernels():
        norm()
        before = [op._loaded for op in Op.with_triton()]
        with checking():
            norm()
        assert [op._loaded for op in Op.with_triton()] == before


@pytest.mark.parametrize(
    ("mine", "theirs", "right"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 4 * TOLERANCES[torch.float32]]), False),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([5, 9], dtype=torch.uint8), torch.tensor([6, 9], dtype=torch.uint8), True),
        (torch.tensor([5, 9], dtype=torch.uint8), torch.tensor([7, 9], dtype=torch.uint8), False),
        (torch.zeros(2), torch.zeros(2), True),
        (torch.tensor([0, 1]), torch.tensor([1, 0]), True),
    ],
)
def test_differences(mine: torch.Tensor, theirs: torch.Tensor, right: bool) -> None:
    assert (difference(mine.to(DEVICE), theirs) <= tolerance(mine.dtype)) == right


@pytest.mark.parametrize("short", [False, True])
def test_a_float32_result_of_16_bit_operands_is_as_rough_as_they_are(short: bool) -> None:
    mine, theirs, faults = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.012]), Faults()
    faults.compare("scan", mine.to(DEVICE), theirs, short=short)
    assert bool(faults.failures) != short
    ((apart, limit),) = faults.apart.values()
    assert (apart <= limit) == short


def test_operands_of_16_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with_fault(monkeypatch, lambda result: (result.float() * 1.005).to(result.dtype))
    with kernels(), checking() as faults:
        rms_norm(randn(3, 64, dtype=torch.bfloat16), randn(64), 1e-6)
    assert not faults.failures
    with kernels(), checking() as faults:
        norm()
    assert len(faults.failures) == 1
