"""The kernels that will serve a model are checked by steps of it, and wrong ones are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from step_graphs import SPECS
from triton_case import DEVICE, kernels

from vlm_serve.engine.numerics.arithmetic import Backend, decide
from vlm_serve.engine.start import kernel_check
from vlm_serve.engine.start.kernel_check import check_at_start, check_kernels
from vlm_serve.errors import EngineError
from vlm_serve.kernels import gated_delta, kv_write, norms, triton_check
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.gated_delta import decoding
from vlm_serve.kernels.linear import low_rank_triton
from vlm_serve.kernels.triton_faults import faults_at
from vlm_serve.models import load_model, read_spec
from vlm_serve.models.parts import feed_forward
from vlm_serve.options.config import EngineConfig

CONFIG = EngineConfig(block_size=16, max_num_seqs=4, dtype="float32", speculative="suffix")


def check(folder: Path, spec: CheckpointSpec, config: EngineConfig = CONFIG) -> str:
    checkpoint = make_checkpoint(folder, spec)
    backend = Backend(torch.device("cpu"))
    arithmetic = decide(config, read_spec(checkpoint).dtype, backend, None)
    model = load_model(checkpoint, arithmetic.types.weights, DEVICE, compiled=False)
    with kernels():
        return check_kernels(model, arithmetic.types, config)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: True)
    monkeypatch.setattr(kernel_check, "LENGTHS", (30, 9))


@pytest.mark.parametrize("name", SPECS)
def test_right_kernels_of_every_kind_of_model_pass(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        check(tmp_path, SPECS[name])
    (line,) = [each for each in caplog.messages if each.startswith("checked")]
    assert int(line.split()[1]) > 8


def test_the_attention_of_the_towers_graphs_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPECS["attention alone"], vision_depth=1)
    check(tmp_path / "right", spec)
    from vlm_serve.kernels.segment_attention import triton as module

    inner = module.segment_attention
    monkeypatch.setattr(module, "segment_attention", lambda *args: 1.1 * inner(*args))
    for op in Op.with_triton():
        monkeypatch.setattr(op, "_loaded", None)
    with pytest.raises(EngineError, match="segment_attention differs from torch"):
        check(tmp_path / "wrong", spec)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_adapters_are_checked_and_leave_the_digest(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_check, "LENGTHS", (6, 5))
    seen: list[Counter[str]] = []
    compare = kernel_check.compare_kernels

    def noted(*args: Any) -> Any:
        faults, digest = compare(*args)
        seen.append(Counter(str(key[0]).partition(":")[2] for key in faults.checked))
        return faults, digest

    monkeypatch.setattr(kernel_check, "compare_kernels", noted)
    own = replace(CONFIG, speculative="off")
    plain = check(tmp_path / "a", SPECS[name], own)
    experts = "all" if name == "moe" else "none"
    changed = replace(own, reserve_loras=True, lora_experts=experts)
    assert check(tmp_path / "b", SPECS[name], changed) == plain
    added = {"few_rows", "product", "reduced"}
    added |= {"routed_experts"} if name == "moe" else set()
    assert set(seen[1] - seen[0]) == added


def test_a_wrong_change_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "LENGTHS", (6, 5))
    inner = low_rank_triton.reduced

    def wrong(*args: Any) -> Any:
        found = inner(*args)
        found.u[0, 0, 3] += 100.0
        return found

    monkeypatch.setattr(low_rank_triton, "reduced", wrong)
    for op in Op.with_triton():
        monkeypatch.setattr(op, "_loaded", None)
    config = replace(CONFIG, speculative="off", reserve_loras=True)
    with pytest.raises(EngineError, match="reduced differs from torch"):
        check(tmp_path, SPECS["dense"], config)


# One value of a state or of a page, which the caller's tensors hold.
PLACES: list[tuple[Op[..., Any], Callable[[Any], torch.Tensor]]] = [
    (gated_delta._chunk, lambda args: args[1]),
    (decoding._mix, lambda args: args[1].state),
    (kv_write._rotate, lambda args: args[4].k),
]


@pytest.mark.parametrize(("fault", "place"), PLACES)
def test_a_wrong_kernel_is_refused_by_name(
    fault: Op[..., Any],
    place: Callable[[Any], torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner: Any = fault.load_triton()
    path, _, name = str(fault.triton).partition(":")

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        place(args)[0, 0, 0, 0] += 1.0
        return out

    monkeypatch.setattr(f"{path}.{name}", wrong)
    with pytest.raises(EngineError, match=f"{name} differs from torch"):
        check(tmp_path, SPECS["dense"])


def with_kernel(monkeypatch: pytest.MonkeyPatch, op: Op[..., Any], change: Any) -> None:
    """Let an op's Triton function return what `change` makes of its result and arguments."""
    inner: Any = op.load_triton()
    path, _, name = str(op.triton).partition(":")
    monkeypatch.setattr(f"{path}.{name}", lambda *a, **k: change(inner(*a, **k), a))
    monkeypatch.setattr(op, "_loaded", None)


def test_the_digest_is_that_of_the_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever drafts has the digest of whoever does not; another last bit is another digest."""
    with caplog.at_level("INFO"):
        digest = check(tmp_path, SPECS["dense"])
    assert len(digest) == 8 and caplog.messages[-1].endswith(f"their bits are {digest}")
    assert check(tmp_path, SPECS["dense"], replace(CONFIG, speculative="off")) == digest

    def change(out: torch.Tensor, _: Any) -> torch.Tensor:
        return out * (1 + 2**-23)

    with_kernel(monkeypatch, norms._rms_norm, change)
    assert check(tmp_path, SPECS["dense"]) != digest


def test_a_kernel_that_ends_the_gpu_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")

    with_kernel(monkeypatch, gated_delta._chunk, fail)
    said = "chunk_gated_delta failed: CUDA error: an illegal memory access was encountered;"
    with pytest.raises(EngineError, match=said):
        check(tmp_path, SPECS["dense"])


def test_a_refusal_says_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper with Triton 3.7.1, whose known fault excludes nothing by itself."""
    known = [fault.sentence(90, "3.7.1") for fault in faults_at(90, "3.7.1")]
    monkeypatch.setattr(kernel_check, "known_faults", lambda device: known)

    def change(out: torch.Tensor, args: Any) -> torch.Tensor:
        args[1][0, 0, 0, 0] += 1.0
        return out

    with_kernel(monkeypatch, gated_delta._chunk, change)
    with pytest.raises(EngineError, match="chunk_gated_delta differs.*Triton 3.8.0 or newer"):
        check(tmp_path, SPECS["dense"])


def test_what_the_host_has_no_time_for_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those kernels still run twice, and the digest is that of a check with time."""
    digest = check(tmp_path, SPECS["dense"])
    monkeypatch.setattr(triton_check, "SECONDS", 0.0)
    assert check(tmp_path, SPECS["dense"]) == digest
    (said,) = [each for each in caplog.messages if each.startswith("not compared with torch")]
    assert "chunk_gated_delta" in said and "rms_norm" in said


@dataclass
class OnGPU:
    """What of a model the check at start asks for before it runs anything."""

    device = torch.device("cuda", 0)


def test_the_digest_enters_the_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    arithmetic = decide(CONFIG, torch.float32, Backend(torch.device("cpu")))
    monkeypatch.setattr(kernel_check, "check_kernels", lambda *_: "1a2b3c4d")
    checked = check_at_start(OnGPU(), arithmetic, CONFIG)  # type: ignore[arg-type]
    assert checked.numerics == f"{arithmetic.numerics}, kernels 1a2b3c4d"


@pytest.mark.parametrize("config", [{"kernel_check": False}, {"tensor_parallel_size": 2}])
def test_what_is_known_is_said_where_nothing_is_checked(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arithmetic = decide(CONFIG, torch.float32, Backend(torch.device("cpu")))
    monkeypatch.setattr(kernel_check, "triton_version", lambda: "3.7.1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model: Any = OnGPU()
    assert check_at_start(model, arithmetic, replace(CONFIG, **config)) == arithmetic
    assert len(caplog.messages) == 2
    assert all("with Triton 3.7.1 on sm_90" in said for said in caplog.messages)


def test_an_unusual_form_enters_the_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    monkeypatch.setattr("vlm_serve.engine.numerics.arithmetic.triton_version", lambda: "3.7.1")
    config = replace(CONFIG, dtype="auto")
    numerics = decide(config, torch.bfloat16, Backend(torch.device("cuda", 0))).numerics
    assert "triton 3.7.1 sums 5, chunk_gated_delta with 16 columns and 2 warps, torch" in numerics
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    numerics = decide(config, torch.bfloat16, Backend(torch.device("cuda", 0))).numerics
    assert "triton 3.7.1 sums 5, torch" in numerics
