"""The table that a server prints when it starts."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm_serve.engine.described import engine_rows
from vlm_serve.engine.numerics.arithmetic import Backend, decide
from vlm_serve.engine.start.parts import EngineParts
from vlm_serve.engine.steps.memory import MemoryPlan, StepMemory
from vlm_serve.models.quantization.scheme import QuantScheme
from vlm_serve.models.weight_sizes import WeightBytes
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.template import TemplateTraits
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.serving import print_notice
from vlm_serve.server.main import startup_rows

MEMORY = MemoryPlan(
    cache_memory=1 << 30,
    block_size=64,
    block_bytes=1 << 20,
    snapshot_bytes=3 << 20,
    num_blocks=10,
    num_snapshot_rows=4,
    num_live_rows=12,
)


def rows(
    server: ServerConfig | None = None,
    scheme: QuantScheme | None = None,
    steps: StepMemory | None = None,
    vision: object = None,
    **options: Any,
) -> dict[str, str]:
    config = EngineConfig(block_size=64, max_num_seqs=12, **options)
    backend = Backend(torch.device(config.device), problem="no compiler")
    preprocessor: Any = SimpleNamespace(template_traits=TemplateTraits(tool_form="hermes"))
    spec: Any = SimpleNamespace(quantization=scheme, vision=vision)
    language: Any = SimpleNamespace(max_length=640)
    adapters: Any = SimpleNamespace(all=list)
    unread: Any = None
    parts = EngineParts(
        config=config,
        spec=spec,
        arithmetic=decide(config, torch.bfloat16, backend),
        weights=WeightBytes(projections=7 << 30, table=1 << 30, others=1 << 30, mapped=True),
        memory=MEMORY,
        preprocessor=preprocessor,
        make_preprocessor=unread,
        language=language,
        scheduler=unread,
        features=unread,
        adapters=adapters,
        executor=unread,
        cache=unread,
        media=unread,
        steps=steps,
    )
    engine: Any = SimpleNamespace(
        rows=lambda: engine_rows(parts), preprocessor=preprocessor, max_model_len=640, pid=None
    )
    return dict(startup_rows(engine, server or ServerConfig(), ("name",), "http://there"))


def test_what_steps_take_is_said_where_it_was_measured() -> None:
    steps = StepMemory(forward=2 << 30, vision=3 << 30, graphs=1 << 30)
    assert (
        rows(steps=steps, device="cuda:0", cuda_graphs=True)["steps"]
        == "4 GiB on top: text 2 GiB, media 3 GiB, graphs 1 GiB"
    )
    assert "steps" not in rows(device="cpu")


SIZES = "12 sequences and 2048 prompt tokens"


@pytest.mark.parametrize(
    ("graphs", "said"),
    [
        (True, f"CUDA graphs for up to {SIZES}, a scratch state of 3 MiB on top"),
        (False, "without CUDA graphs"),
    ],
)
def test_a_gpu_decodes_with_or_without_graphs(graphs: bool, said: str) -> None:
    assert rows(device="cuda:0", cuda_graphs=graphs)["decode"] == said


def test_pictures_have_graphs_too() -> None:
    tower = SimpleNamespace(has_fixed_form=True, merge_size=2)
    told = rows(device="cuda:0", cuda_graphs=True, max_num_batched_tokens=300, vision=tower)
    assert "prompt tokens, pictures of up to 2048 patches, a scratch" in told["decode"]


def test_steps_with_drafts_have_graphs_too() -> None:
    options: dict[str, Any] = {"cuda_graphs": True, "speculative_tokens": 3}
    told = rows(device="cuda:0", speculative="suffix", **options)["decode"]
    assert told.startswith("CUDA graphs for up to 12 sequences (12 with drafts) and 2048 prompt")


@pytest.mark.parametrize(("compiled", "said"), [(True, "torch and compiled"), (False, "torch")])
def test_a_cpu_has_compiled_kernels_or_none(compiled: bool, said: str) -> None:
    kernels = rows(device="cpu", threads=2, compiled_kernels=compiled)["kernels"]
    assert kernels == f"{said}, 2 threads"


def test_a_cpu_has_no_graphs_to_speak_of() -> None:
    assert "decode" not in rows(device="cpu", threads=2)


def test_weights_types_and_arithmetic_are_said() -> None:
    found = rows(device="cpu", threads=2, kv_cache_dtype="int8")
    assert found["weights"] == "8 GiB, beside a table of 1 GiB in its file"
    types = "weights float32, kv int8, state float32, conv float32, vision float32"
    assert found["types"] == types
    assert found["compute"].startswith("float32: torch computes") and "no compiler" in str(found)
    assert f"torch {torch.__version__}" in found["numerics"]


def test_what_a_checkpoint_says_of_its_activations_is_said() -> None:
    fields = {"quant_method": "fp8", "activation_scheme": "static"}
    found = rows(scheme=QuantScheme.of({"quantization_config": fields}), device="cpu", threads=2)
    said = "fp8; made for quantised activations (static input_scale), which is not followed"
    assert found["quantised"] == said
    assert "quantised" not in rows(device="cpu", threads=2)


def test_memory_for_stored_responses_is_said() -> None:
    server = ServerConfig(response_store="64MiB", response_store_ttl=60)
    found = rows(server, device="cpu", threads=2)
    assert found["stored responses"] == "64 MiB per API key, 60 s, on top"
    assert found["held media"] == "64 MiB per API key, on top"
    none = rows(ServerConfig(response_store=0, media_store=0), device="cpu", threads=2)
    assert "stored responses" not in none and "held media" not in none


def test_space_for_files_is_said() -> None:
    found = rows(ServerConfig(batch_store="2GiB", media_files="1GiB"), device="cpu", threads=2)
    assert found["files and batches"] == "2 GiB on disk per API key"
    assert found["files of media"] == "1 GiB on disk per API key"
    assert "files and batches" not in rows(device="cpu", threads=2)


def test_the_form_of_tool_calls_is_said() -> None:
    assert rows(device="cpu")["tool calls"] == "hermes"
    for form in ("qwen3_xml", "none"):
        server = ServerConfig(tool_call_parser=form)
        assert rows(server, device="cpu")["tool calls"] == form


def test_nobody_need_read_the_table(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk or a closed pipe behind the standard output ends no server."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        print_notice("a table")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert "the notice could not be printed" in caplog.text
