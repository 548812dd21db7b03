"""The table of what a prompt's bits depend on has every op, and what is said follows from it."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint

from vlm_serve.engine.numerics import dependence, invariance
from vlm_serve.engine.numerics.arithmetic import Backend, decide
from vlm_serve.engine.numerics.dependence import OPS, USUAL, blamed, parts_of
from vlm_serve.engine.numerics.invariance import promise
from vlm_serve.kernels.dispatch import Op
from vlm_serve.models import read_spec
from vlm_serve.options.config import EngineConfig

GPU = torch.device("cuda")
ROOT = Path(__file__).resolve().parents[3]
PAGE, KERNELS = ROOT / "docs" / "step.md", ROOT / "kernels"


def test_every_op_with_kernels_for_gpus_is_in_the_table() -> None:
    for path in KERNELS.glob("*/*.py"):
        if " = Op(" in path.read_text():  # Ops add themselves to the list of all.
            name = f"vlm_serve.kernels.{path.parent.name}.{path.stem}"
            import_module(name.removesuffix(".__init__"))
    ops = {str(op.triton).removeprefix("vlm_serve.kernels.") for op in Op.with_triton()}
    ops = {name for name in ops if not name.startswith("test")}
    libraries = {"gated_delta.fla:chunk_gated_delta"}
    assert ops | libraries == {name for name in OPS if not name.startswith("torch ")}


def test_every_implementation_of_the_page_is_in_the_table() -> None:
    named = {
        f"{path.replace('/', '.')}:{function}"
        for path, function in re.findall(r"`([\w/]*triton)\.py:(\w+)`", PAGE.read_text())
    }
    assert named and named <= OPS.keys()


def test_what_depends_on_company_has_a_name_and_a_reason() -> None:
    for name, op in OPS.items():
        assert op.why, name
        assert bool(op.name) == (op.on != "nothing"), name
        assert op.fixed in ("nothing", op.on), name


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {}, ["products with plain weights"]),
        (
            {"num_experts": 8},
            {"quantization": "int4"},
            ["products with plain", "products with quantised", "routed experts"],
        ),
        ({"vision_depth": 2}, {}, ["products with plain weights", "the vision tower"]),
        ({}, {"gpu_kernels": "fla"}, ["products with plain", "chunk_gated_delta by fla"]),
    ],
)
def test_a_model_and_its_options_say_what_is_to_blame(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], said: list[str]
) -> None:
    checkpoint = make_checkpoint(tmp_path, replace(CheckpointSpec(vision_depth=0), **changes))
    spec, config = read_spec(checkpoint), EngineConfig(**options)
    parts = parts_of(spec, config)
    found = promise(GPU, compiled=False, wanted=False, parts=parts)
    assert found.reach == "none" and len(found.blamed) == len(said)
    assert all(name.startswith(start) for name, start in zip(found.blamed, said, strict=True))
    assert all(name in found.reason for name in found.blamed)
    if "gpu_kernels" not in options:
        fixed = promise(GPU, compiled=False, wanted=True, parts=parts)
        assert (fixed.reach, fixed.blamed) == ("answers", ())
        rows = dict(decide(config, torch.bfloat16, Backend(GPU), None, parts).rows())
        assert found.blamed[-1] in rows["batch-invariant"]


def test_hits_are_exact_where_nothing_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    never = {name: op._replace(on="nothing", name="") for name, op in OPS.items()}
    monkeypatch.setattr(dependence, "OPS", never)
    assert list(blamed(USUAL, fixed=False)) == []
    assert invariance.promise(GPU, compiled=False, wanted=False).reach == "prompts"
