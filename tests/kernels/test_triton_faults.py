"""Known faults of Triton choose another form of a kernel where it has one, and nothing else."""

from __future__ import annotations

import pytest
import torch
from triton_case import DEVICE, kernels, randn, row_by_row

from vlm_serve.kernels import gated_delta as gated_delta_ops
from vlm_serve.kernels import paged_attention, triton_support
from vlm_serve.kernels.dispatch import Op, triton_everywhere
from vlm_serve.kernels.gated_delta import chunk_gated_delta
from vlm_serve.kernels.gated_delta import triton as gated_delta
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_faults import FAULTS, faults_at, form_of, forms_at
from vlm_serve.kernels.triton_support import Launch, Target, record_launches

SCAN = "chunk_gated_delta"


@pytest.mark.parametrize(
    ("architecture", "triton", "narrow"),
    [
        (100, "3.6.0", True),
        (100, "3.7.0", False),
        (100, "3.7.1", False),
        (103, "3.7.1", True),
        (103, "3.7.1+git0f1e", True),
        (103, "3.8.0", False),
        (90, "3.6.0", False),
        (90, "3.7.1", False),
        (80, "3.6.0", False),
        (120, "3.6.0", False),
        (100, "none", False),
    ],
)
def test_the_form_of_a_kernel(architecture: int, triton: str, narrow: bool) -> None:
    assert bool(form_of(SCAN, architecture, triton)) == narrow
    named = [f"{SCAN} with 16 columns and 2 warps"] if narrow else []
    assert list(forms_at(architecture, triton)) == named


def test_a_version_alone_excludes_no_hopper() -> None:
    """Its faults have no other form: the check at start decides."""
    for triton in ("3.6.0", "3.7.1"):
        faults = faults_at(90, triton)
        assert {fault.op for fault in faults} == {SCAN, "attention_prefill"}
        for fault in faults:
            assert "must pass the check at start" in fault.sentence(90, triton)
    assert not faults_at(90, "3.3.0")
    assert not faults_at(89, "3.6.0")


def test_sentences_say_what_is_done_and_what_to_do() -> None:
    (narrow,) = faults_at(103, "3.7.1")
    said = narrow.sentence(103, "3.7.1")
    assert said.startswith("chunk_gated_delta has 16 columns and 2 warps: with Triton 3.7.1 on")
    (scan,) = [fault for fault in faults_at(90, "3.7.1") if fault.op == SCAN]
    assert scan.sentence(90, "3.7.1").endswith("Triton 3.8.0 or newer has no such fault")


def test_entries_name_kernels_that_exist() -> None:
    for module in (paged_attention, gated_delta_ops):
        assert module.__name__.startswith("vlm_serve.kernels.")
    names = {str(op.triton).partition(":")[2] for op in Op.with_triton()}
    assert {fault.op for fault in FAULTS} <= names


def meta(tokens: int) -> PrefillMeta:
    return PrefillMeta(
        cu_seqlens=(0, tokens),
        starts=(0,),
        block_tables=((0, 1),),
        src_rows=(-1,),
        dst_rows=(0,),
        chunk_ends=(tuple(sorted({min(64, tokens), tokens})),),
        snapshots=(),
    )


def launches(target: Target, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    q = torch.empty(100, 1, 64, dtype=dtype)
    v = torch.empty(100, 2, 64, dtype=dtype)
    g, beta, state = (
        torch.empty(100, 2),
        torch.empty(100, 2, dtype=dtype),
        torch.empty(1, 2, 64, 64),
    )
    with triton_everywhere(), record_launches(target) as found:
        chunk_gated_delta(q, q, v, g, beta, state, meta(100))
    return [each for each in found if each.kernel.__name__ == "_scan_kernel"]


@pytest.mark.parametrize(
    ("architecture", "dtype", "columns", "warps"),
    [
        (103, torch.bfloat16, 16, 2),
        (103, torch.float32, 16, 8),
        (90, torch.bfloat16, 32, 4),
        (80, torch.bfloat16, 32, 8),
        (120, torch.bfloat16, 32, 8),
    ],
)
def test_the_scan_that_is_launched(
    architecture: int,
    dtype: torch.dtype,
    columns: int,
    warps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_support, "triton_version", lambda: "3.7.1")
    (scan,) = launches(Target("cuda", architecture), dtype)
    assert scan.arguments["SIZES"].columns == columns
    assert scan.options["num_warps"] == warps
    assert scan.grid[0] == 64 // columns


def test_both_forms_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = randn(70, 1, 64, dtype=torch.bfloat16), randn(70, 1, 64, dtype=torch.bfloat16, seed=1)
    v = randn(70, 2, 64, dtype=torch.bfloat16, seed=2)
    g, beta = -randn(70, 2).abs(), randn(70, 2, dtype=torch.bfloat16, seed=3).sigmoid()
    results = []
    for narrow in (False, True):
        monkeypatch.setattr(gated_delta, "needs_other_form", lambda op, target, it=narrow: it)
        state = torch.zeros(1, 2, 64, 64, device=DEVICE)
        with kernels(), row_by_row():
            results.append((chunk_gated_delta(q, k, v, g, beta, state, meta(70)), state))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert float(results[0][1].abs().max()) > 0
