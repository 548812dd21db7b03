"""What compiled steps refuse, and what they leave to the ops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from compiled_cases import SPECS
from make_checkpoint import make_checkpoint
from model_driver import Driver, Sequence_, text_sequence

from vlm_serve.engine.start.build import build
from vlm_serve.engine.steps import step_paths
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.errors import ConfigError
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.native_build import BuildError
from vlm_serve.models import load_model
from vlm_serve.models.program import UnsupportedError
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.identity.keys import RootFields

pytestmark = pytest.mark.usefixtures("compiler")


def begun(folder: Path) -> tuple[Driver, Sequence_]:
    """A compiled dense model, and a sequence of three tokens that it has computed."""
    path = make_checkpoint(folder, SPECS["dense"])
    model = load_model(path, torch.float32, "cpu", compiled=True)
    driver = Driver(model, num_blocks=8, num_rows=4)
    model.compile_steps(driver.caches)
    one = text_sequence([1, 2, 3])
    driver.step(prefills=[(one, 0, 3)])
    return driver, one


def test_bad_rows_and_blocks(tmp_path: Path) -> None:
    driver, one = begun(tmp_path)
    one.tokens.append(4)
    one.row = 4
    with pytest.raises(KernelArgumentError, match=r"meta.src_rows"):
        driver.step([one])
    one.row, one.blocks = 0, [8]
    with pytest.raises(KernelArgumentError, match=r"meta.block_tables"):
        driver.step([one])


@pytest.mark.parametrize("token", [-1, SPECS["dense"].vocab_size])
def test_a_token_without_an_embedding(tmp_path: Path, token: int) -> None:
    driver, one = begun(tmp_path)
    one.tokens.append(token)
    with pytest.raises(RuntimeError, match="vlm_step"):
        driver.step([one])
    one.tokens[-1] = 4
    assert driver.step([one]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "dtype", "pools", "reason"),
    [
        (CheckpointSpec(hidden_size=72), torch.float32, {}, "hidden_size is 72"),
        (CheckpointSpec(head_dim=24), torch.float32, {}, "head_dim is 24"),
        (CheckpointSpec(conv_kernel=10), torch.float32, {}, "10 taps"),
        (CheckpointSpec(), torch.float16, {}, "activations in torch.float16"),
        (CheckpointSpec(), torch.float32, {"recurrent": torch.float16}, "states in torch.float16"),
        (CheckpointSpec(), torch.bfloat16, {"kv": torch.float32}, "KV pages in torch.float32"),
        (CheckpointSpec(), torch.bfloat16, {"kv": torch.float16}, "KV pages in torch.float16"),
    ],
)
def test_what_it_does_not_know(
    tmp_path: Path,
    spec: CheckpointSpec,
    dtype: torch.dtype,
    pools: dict[str, torch.dtype],
    reason: str,
) -> None:
    path = make_checkpoint(tmp_path, replace(spec, vision_depth=0))
    model = load_model(path, dtype, "cpu", compiled=True)
    caches = Driver(model).caches
    changed = {name: caches[name].to(kind) for name, kind in pools.items()}
    with pytest.raises(UnsupportedError, match=reason):
        model.compile_steps(replace(caches, tensors={**caches.tensors, **changed}))


def test_other_pools_are_for_the_ops(tmp_path: Path) -> None:
    """What was compiled holds the addresses of its own pools."""
    path = make_checkpoint(tmp_path, SPECS["dense"])
    model = load_model(path, torch.float32, "cpu", compiled=True)
    first, second = Driver(model), Driver(model)
    model.compile_steps(first.caches)
    second.step(prefills=[(text_sequence([1, 2, 3]), 0, 3)])
    assert first.caches["recurrent"].isnan().all()
    assert not second.caches["recurrent"].isnan().all()


def config(**options: bool | str) -> EngineConfig:
    given = {"dtype": "float32", "block_size": 16, "cache_memory": "16MiB"} | options
    return EngineConfig(**given)  # type: ignore[arg-type]


def test_the_engine_compiles_unless_told_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(make_checkpoint(tmp_path, SPECS["dense"]))

    def built(**options: bool | str) -> tuple[bool | None, bool]:
        parts = build(path, config(**options))
        assert isinstance(parts.executor, LocalExecutor)
        return parts.config.compiled_kernels, parts.executor._model._compiled_step is not None

    assert built() == (True, True)
    assert built(compiled_kernels=False) == (False, False)
    assert built(deterministic=True) == (True, True)
    for kv in ("float32", "bfloat16", "float16", "fp8", "int8"):
        assert built(kv_cache_dtype=kv) == (True, True)
    assert built(state_dtype="bfloat16") == (True, True)
    assert not caplog.text
    narrow = {"dtype": "bfloat16", "compute_dtype": "bfloat16"}
    assert built(**narrow, kv_cache_dtype="float16") == (True, False)
    assert "steps are not compiled as a whole: KV pages in torch.float16" in caplog.text


@pytest.mark.parametrize("key_dim", [32, 24])
def test_the_numerics_name_what_plain_torch_computes(tmp_path: Path, key_dim: int) -> None:
    """A width that is no multiple of a vector's is left to it."""
    path = str(make_checkpoint(tmp_path, replace(SPECS["dense"], gdn_key_dim=key_dim)))
    parts, plain = build(path, config()), key_dim % 16 != 0
    assert parts.arithmetic.numerics.endswith(", plain torch sums 1") is plain
    root = parts.preprocessor._root_key
    assert isinstance(root, RootFields) and root.numerics == parts.arithmetic.numerics


def test_an_engine_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise BuildError("a C++ compiler was not found")

    monkeypatch.setattr(step_paths, "digests", fail)
    path = str(make_checkpoint(tmp_path, SPECS["dense"]))
    assert build(path, config()).config.compiled_kernels is False
    assert "there are no compiled kernels: a C++ compiler was not found" in caplog.text
    with pytest.raises(ConfigError, match="compiled_kernels: a C"):
        build(path, config(compiled_kernels=True))
