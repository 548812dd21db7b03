"""Which types a model gets, and what the arithmetic is called."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from vlm_serve.engine.numerics.arithmetic import Backend, decide
from vlm_serve.engine.steps import step_paths
from vlm_serve.engine.steps.step_paths import find_backend
from vlm_serve.errors import ConfigError
from vlm_serve.kernels.native_build import BuildError
from vlm_serve.kernels.native_self_test import SelfTestDigests
from vlm_serve.models.quantization.scheme import QuantScheme
from vlm_serve.options.config import EngineConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TORCH = Backend(CPU)
PLAIN = Backend(CPU, SelfTestDigests("aaaa", None))
PAIRS = Backend(CPU, SelfTestDigests("aaaa", "bbbb"))
TILES = Backend(CPU, SelfTestDigests("aaaa", "bbbb", tiles=True))


def types_of(checkpoint: str, backend: Backend, **options: Any) -> dict[str, str]:
    config = EngineConfig(**options)
    return decide(config, getattr(torch, checkpoint), backend).types.names()


@pytest.mark.parametrize(
    ("checkpoint", "backend", "options", "weights", "compute"),
    [
        ("bfloat16", PAIRS, {}, "bfloat16", "bfloat16"),
        ("bfloat16", PLAIN, {}, "bfloat16", "float32"),
        ("float16", PAIRS, {}, "float16", "float32"),
        ("float32", PAIRS, {}, "float32", "float32"),
        ("bfloat16", PAIRS, {"dtype": "float32"}, "float32", "float32"),
        ("float32", PAIRS, {"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ("bfloat16", PAIRS, {"compute_dtype": "float32"}, "bfloat16", "float32"),
        ("bfloat16", PLAIN, {"compute_dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ("bfloat16", TORCH, {}, "float32", "float32"),
        ("float32", TORCH, {"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ("bfloat16", Backend(GPU), {}, "bfloat16", "bfloat16"),
        ("bfloat16", Backend(GPU), {"dtype": "float16"}, "float16", "float16"),
        ("float16", Backend(GPU), {"compute_dtype": "float16"}, "float16", "float16"),
    ],
)
def test_weights_and_what_follows_the_compute_type(
    checkpoint: str, backend: Backend, options: dict[str, Any], weights: str, compute: str
) -> None:
    names = types_of(checkpoint, backend, **options)
    assert names.pop("weights") == weights
    assert names.pop("state") == "float32"
    assert names == dict.fromkeys(("compute", "kv", "conv", "vision"), compute)


def test_cache_types_are_options_of_their_own() -> None:
    names = types_of("bfloat16", PAIRS, kv_cache_dtype="int8", state_dtype="bfloat16")
    assert (names["kv"], names["state"], names["conv"]) == ("int8", "bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("backend", "options", "problem"),
    [
        (PAIRS, {"dtype": "float32", "compute_dtype": "bfloat16"}, "be float32 with .* float32"),
        (PAIRS, {"dtype": "float16", "compute_dtype": "bfloat16"}, "be float32 with .* float16"),
        (PAIRS, {"compute_dtype": "float16"}, "be float32 or bfloat16 with"),
        (TORCH, {"compute_dtype": "bfloat16"}, "be float32, .* torch computes in the type of"),
        (Backend(GPU), {"compute_dtype": "float32"}, "be bfloat16, .* a GPU computes in the type"),
    ],
)
def test_a_compute_type_for_which_there_is_no_code(
    backend: Backend, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"^compute_dtype must {problem}") as raised:
        types_of("bfloat16", backend, **options)
    assert raised.value.param == "compute_dtype"


@pytest.mark.parametrize(
    ("checkpoint", "backend", "options", "reason"),
    [
        ("bfloat16", PAIRS, {}, "there are products of bfloat16 pairs"),
        ("bfloat16", TILES, {}, "there are products of bfloat16 tiles \\(AMX\\)"),
        ("bfloat16", PLAIN, {}, "no products of bfloat16 pairs .* widened in registers"),
        ("float16", PAIRS, {}, "no products of float16; weights are widened"),
        ("float32", PAIRS, {}, "as the weights"),
        ("bfloat16", PAIRS, {"compute_dtype": "float32"}, "as requested$"),
        ("bfloat16", PLAIN, {"compute_dtype": "bfloat16"}, "float32 is faster and more exact"),
        ("float32", Backend(CPU, problem="no g++"), {}, "torch computes, since .*: no g\\+\\+"),
    ],
)
def test_the_reason_is_said(
    checkpoint: str, backend: Backend, options: dict[str, Any], reason: str
) -> None:
    arithmetic = decide(EngineConfig(**options), getattr(torch, checkpoint), backend)
    rows = dict(arithmetic.rows())
    assert rows["compute"].startswith(arithmetic.types.names()["compute"] + ": ")
    assert re.search(reason, rows["compute"])
    assert rows["numerics"] == arithmetic.numerics
    for name in ("weights", "kv", "state", "conv", "vision"):
        assert f"{name} {arithmetic.types.names()[name]}" in rows["types"]


def numerics(backend: Backend, **options: Any) -> str:
    return decide(EngineConfig(**options), torch.bfloat16, backend).numerics


def test_numerics_name_digest_and_torch() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    of_torch = f"torch {torch.__version__} {capability}"
    beside = rf", torch {re.escape(torch.__version__.split('+')[0])} [0-9a-f]{{8}} {capability}"
    kernels = "version 7, cpu-compiled"
    assert re.fullmatch(f"{kernels} bfloat16-pairs bbbb{beside}", numerics(PAIRS))
    assert re.fullmatch(f"{kernels} bfloat16-tiles bbbb{beside}", numerics(TILES))
    assert re.fullmatch(f"{kernels} float32 aaaa{beside}", numerics(PLAIN))
    plain = f"version 7, plain torch sums 1, {of_torch}"
    assert numerics(TORCH) == plain
    assert numerics(TORCH, deterministic=True) == f"{plain}, batch-invariant"
    assert "triton" in numerics(Backend(GPU))
    asked = {"compute_dtype": "bfloat16"}
    assert re.fullmatch(f"{kernels} bfloat16 aaaa{beside}", numerics(PLAIN, **asked))


MADE_FROM = """PyTorch built with:
  - GCC 13.3
  - Intel(R) oneAPI Math Kernel Library Version 2024.2
  - CPU capability usage: AVX512
"""


class Build:
    """Stands in for another build of torch.

    Args:
        version: with its local part.
        made_from: what it says that its CPU code was made from.
        more: what it says behind that.
        commit: of its source.
    """

    def __init__(
        self,
        version: str = "2.13.0+cpu",
        made_from: str = MADE_FROM,
        more: str = "  - Build settings: USE_CUDA=0",
        commit: str = "cf30153c",
    ) -> None:
        self._version, self._said, self._commit = version, made_from + more, commit

    def numerics(self, backend: Backend) -> str:
        """Return the name of the arithmetic that it is part of."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "__version__", self._version)
            patch.setattr(torch.__config__, "show", lambda: self._said)
            patch.setattr(torch.version, "git_version", self._commit)
            return numerics(backend)


CPU_BUILD = Build()
CUDA_SAID = "  - CUDA Runtime 13.0\n  - CuDNN 92.0\n  - Build settings: USE_CUDA=1"
CUDA_BUILD = Build("2.13.0+cu130", more=CUDA_SAID)


@pytest.mark.parametrize("backend", [PLAIN, PAIRS, TILES])
def test_beside_compiled_kernels_builds_of_one_release_are_one_torch(backend: Backend) -> None:
    name = CPU_BUILD.numerics(backend)
    assert name == CUDA_BUILD.numerics(backend) == Build("2.13.0").numerics(backend)
    assert "+cpu" not in name


@pytest.mark.parametrize(
    "other",
    [
        Build("2.13.1+cpu"),
        Build(commit="0123abcd"),
        Build(made_from=MADE_FROM.replace("GCC 13.3", "GCC 14.1")),
        Build(made_from=MADE_FROM.replace("2024.2", "2025.0")),
    ],
    ids=["release", "commit", "compiler", "library"],
)
def test_another_release_commit_compiler_or_library_is_another_torch(other: Build) -> None:
    assert CPU_BUILD.numerics(PLAIN) != other.numerics(PLAIN)


@pytest.mark.parametrize("backend", [TORCH, Backend(GPU)])
def test_where_torch_computes_its_build_is_named(backend: Backend) -> None:
    assert "torch 2.13.0+cpu" in CPU_BUILD.numerics(backend)
    assert "torch 2.13.0+cu130" in CUDA_BUILD.numerics(backend)


def test_float32_beside_any_weights_is_one_arithmetic() -> None:
    kinds = {numerics(PAIRS, dtype="float32"), numerics(PAIRS, dtype="float16"), numerics(PLAIN)}
    assert len(kinds) == 1


def test_a_library_that_may_not_be_used_leaves_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> SelfTestDigests:
        raise BuildError("the library failed its self-test: digest 1, expected 2")

    monkeypatch.setattr(step_paths, "digests", fail)
    monkeypatch.setattr(step_paths, "foreseen", fail)
    for build in (True, False):
        backend = find_backend(EngineConfig(), CPU, build=build)
        assert not backend.compiled
        reason = decide(EngineConfig(), torch.bfloat16, backend).reason
        assert reason.startswith("torch computes") and "failed its self-test" in reason
    with pytest.raises(ConfigError, match="^compiled_kernels: the library failed its self-test"):
        find_backend(EngineConfig(compiled_kernels=True), CPU)
    assert find_backend(EngineConfig(compiled_kernels=False), CPU) == TORCH


DOTS = Backend(CPU, SelfTestDigests("aaaa", "bbbb", integer_dots=True))


@pytest.mark.parametrize(
    ("backend", "options", "dynamic"),
    [
        (DOTS, {"quantization": "int4"}, True),
        (DOTS, {"quantization": "int6"}, True),
        (DOTS, {"quantization": "int8", "quantized_activations": "none"}, False),
        (DOTS, {}, False),
        (PAIRS, {"quantization": "int8"}, False),
        (PAIRS, {"quantization": "int8", "quantized_activations": "int8"}, True),
        (TORCH, {"quantization": "int8"}, False),
    ],
)
def test_quantising_has_a_name(backend: Backend, options: dict[str, Any], dynamic: bool) -> None:
    arithmetic = decide(EngineConfig(**options), torch.bfloat16, backend)
    assert arithmetic.dynamic is dynamic
    bits = {"int8": 8, "int6": 6, "int4": 4, None: None}
    assert arithmetic.bits == bits[options.get("quantization")]
    assert ("int8 activations" in arithmetic.numerics) is dynamic
    rows = dict(arithmetic.rows())
    assert ("int8 per row and group" in rows["compute"]) is dynamic
    if arithmetic.bits is not None:
        assert f"weights in int{arithmetic.bits}" in arithmetic.numerics
        assert f"projections int{arithmetic.bits}" in rows["types"]


def test_quantised_activations_need_compiled_kernels() -> None:
    config = EngineConfig(quantization="int8", quantized_activations="int8")
    with pytest.raises(ConfigError, match="^quantized_activations must be auto or none"):
        decide(config, torch.bfloat16, TORCH)


def test_what_is_quantised_is_not_quantised_again() -> None:
    stored = QuantScheme.of({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}})
    with pytest.raises(ConfigError, match="^quantization is int4, but the checkpoint is"):
        decide(EngineConfig(quantization="int4"), torch.bfloat16, DOTS, stored)
