"""Types in which a model is stored and computed, and the resulting name of the arithmetic.

Weights, activations, keys and values, recurrent state and convolution tails each have their own
type. All are decided here, from options, checkpoint and backend.

docs/architecture.md#weights-and-arithmetic
"""

from __future__ import annotations

import hashlib
from collections.abc import Set
from dataclasses import dataclass, fields, replace
from itertools import takewhile

import torch

from vlm_serve.engine.numerics.dependence import USUAL, Part
from vlm_serve.engine.numerics.invariance import Promise, check_options, promise
from vlm_serve.errors import ConfigError
from vlm_serve.kernels import tuning
from vlm_serve.kernels.backends import named
from vlm_serve.kernels.native_self_test import SelfTestDigests
from vlm_serve.kernels.triton_faults import forms_at, triton_version
from vlm_serve.kernels.tuning_check import check_table
from vlm_serve.models.cache_layout import Content, Dtypes
from vlm_serve.models.quantization.scheme import QuantScheme
from vlm_serve.options.config import EngineConfig

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.uint8,
}
"""Stored types by option value; int8 means unsigned codes with scales."""
NUMERICS_VERSION = 7
"""Raised whenever a kernel's arithmetic changes; results of older code are then not reused."""
TRITON_SUMS = 5
"""Raised whenever the arithmetic on GPUs changes, and no other."""
PLAIN_SUMS = 1
"""Raised whenever the arithmetic of the plain torch implementations changes, and that of no others;
see `kernels/plain.py`."""

_FLOAT32, _BFLOAT16 = torch.float32, torch.bfloat16
_PAIRS = "products of bfloat16 pairs (AVX512-BF16)"
_TILES = "products of bfloat16 tiles (AMX)"
_PLAIN = f"plain torch sums {PLAIN_SUMS}"


@dataclass(frozen=True, slots=True)
class Backend:
    """Device and kernels that compute.

    Attributes:
        device: device; while planning, it may be a GPU that this machine lacks.
        digests: self-test digests of the compiled CPU kernels; None without compiled kernels.
        problem: why there are none although they were wanted, in a sentence.
    """

    device: torch.device
    digests: SelfTestDigests | None = None
    problem: str = ""

    @property
    def compiled(self) -> bool:
        """True if compiled CPU kernels compute."""
        return self.digests is not None

    @property
    def products(self) -> str | None:
        """Name of the compiled kernels' bfloat16 products; None if the processor has none."""
        if self.digests is None or self.digests.pairs is None:
            return None
        return _TILES if self.digests.tiles else _PAIRS


@dataclass(frozen=True, slots=True)
class Types:
    """Type of every kind of data.

    Attributes:
        weights: projections and lookup tables in memory.
        compute: activations, and weights that are not matrices.
        kv: keys and values in the cache; uint8 stands for int8 codes with scales.
        state: what layers add tokens to, such as recurrent matrices.
        conv: inputs of convolutions.
        vision: activations of the tower.
    """

    weights: torch.dtype
    compute: torch.dtype
    kv: torch.dtype
    state: torch.dtype
    conv: torch.dtype
    vision: torch.dtype

    @property
    def pools(self) -> Dtypes:
        """Types of the data that layers keep between steps, by what it is."""
        types: dict[Content, torch.dtype] = {
            "kv": self.kv,
            "state": self.state,
            "inputs": self.conv,
            "activations": self.compute,
            "exact": _FLOAT32,
        }
        return types | ({"scales": torch.float16} if self.kv == torch.uint8 else {})

    def names(self) -> dict[str, str]:
        """Return the option value of each type, by attribute."""
        return {field.name: name_of(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Arithmetic of a model.

    Attributes:
        types: types of all data.
        reason: why `types.compute` was chosen.
        numerics: name of all arithmetic; equal names mean equal bits.
        bits: width to which plain weights are quantised while loading; None if they are not.
        dynamic: True if activations beside integer codes are quantised to int8.
        promise: results independent of batches and hits.
    """

    types: Types
    reason: str
    numerics: str
    bits: int | None = None
    dynamic: bool = False
    promise: Promise = Promise()

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of `plan` and the start-up table: (name, text)."""
        names = self.types.names()
        if self.bits is not None:
            names["weights"] += f" (projections int{self.bits})"
        compute = names.pop("compute")
        if self.dynamic:
            compute += ", int8 per row and group beside integer weights"
        return [
            ("types", ", ".join(f"{name} {kind}" for name, kind in names.items())),
            ("compute", f"{compute}: {self.reason}"),
            ("numerics", self.numerics),
            ("batch-invariant", str(self.promise)),
        ]


def decide(
    config: EngineConfig,
    checkpoint: torch.dtype,
    backend: Backend,
    stored: QuantScheme | None = None,
    parts: Set[Part] = USUAL,
) -> Arithmetic:
    """Decide the types and the arithmetic of a model.

    Args:
        config: options; "auto" values are decided here.
        checkpoint: type of the checkpoint's weights.
        backend: device and kernels.
        stored: quantisation of the checkpoint's own weights; None if they are not quantised.
        parts: what decides which ops run, see `parts_of`.

    Raises:
        ConfigError: a type that nothing computes here, or an option that this arithmetic excludes;
            names the option.
    """
    check_options(config, compiled=backend.compiled)
    weights = _weights(config, checkpoint, backend)
    compute, reason = _compute(config, weights, backend)
    types = Types(
        weights=weights,
        compute=compute,
        kv=DTYPES.get(config.kv_cache_dtype, compute),
        state=DTYPES.get(config.state_dtype, _FLOAT32),
        conv=compute,
        vision=compute,
    )
    if stored is not None and config.quantization is not None:
        raise ConfigError(
            f"quantization is {config.quantization}, but the checkpoint is quantised already",
            param="quantization",
        )
    bits = None if config.quantization is None else int(config.quantization.removeprefix("int"))
    integers = bits is not None or (stored is not None and stored.integers)
    dynamic = _dynamic(config, backend, quantised=integers)
    numerics = _numerics(compute, backend, config)
    numerics += "" if bits is None else f", weights in {config.quantization}"
    numerics += ", int8 activations" if dynamic else ""
    promised = promise(
        backend.device, compiled=backend.compiled, wanted=config.deterministic, parts=parts
    )
    return Arithmetic(types, reason, numerics, bits, dynamic, promised)


def _dynamic(config: EngineConfig, backend: Backend, *, quantised: bool) -> bool:
    """Return True if activations are quantised."""
    wanted = config.quantized_activations
    if wanted == "int8" and not backend.compiled:
        raise ConfigError(
            "quantized_activations must be auto or none, got int8: there are no compiled kernels",
            param="quantized_activations",
        )
    fast = backend.digests is not None and backend.digests.integer_dots
    return quantised and (wanted == "int8" or (wanted == "auto" and fast))


def name_of(dtype: torch.dtype) -> str:
    """Return the option value of a type."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def _weights(config: EngineConfig, checkpoint: torch.dtype, backend: Backend) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if backend.device.type != "cpu" or backend.compiled:
        return checkpoint
    return _FLOAT32


def _compute(
    config: EngineConfig, weights: torch.dtype, backend: Backend
) -> tuple[torch.dtype, str]:
    """Return the type of activations and the reason."""
    wanted = None if config.compute_dtype == "auto" else DTYPES[config.compute_dtype]
    if backend.compiled:
        return _compiled_compute(wanted, weights, backend.products)
    if wanted not in (None, weights):
        where = "a GPU computes" if backend.device.type != "cpu" else "without compiled kernels"
        where += "" if backend.device.type != "cpu" else " torch computes"
        problem = f"compute_dtype must be {name_of(weights)}, got {config.compute_dtype}: {where} "
        raise ConfigError(problem + "in the type of the weights", param="compute_dtype")
    if backend.problem:
        return weights, f"torch computes, since there are no compiled kernels: {backend.problem}"
    return weights, "as the weights"


def _compiled_compute(
    wanted: torch.dtype | None, weights: torch.dtype, products: str | None
) -> tuple[torch.dtype, str]:
    possible = (_FLOAT32, _BFLOAT16) if weights == _BFLOAT16 else (_FLOAT32,)
    if wanted is not None and wanted not in possible:
        raise ConfigError(
            f"compute_dtype must be {' or '.join(map(name_of, possible))} with weights in "
            f"{name_of(weights)}, got {name_of(wanted)}",
            param="compute_dtype",
        )
    if wanted == _BFLOAT16 and not products:
        reason = f"as requested; there are no {_PAIRS}, so float32 is faster and more exact"
    elif wanted is not None:
        reason = "as requested"
    elif weights == _FLOAT32:
        reason = "as the weights"
    elif weights == _BFLOAT16 and products:
        reason = f"there are {products}"
    else:
        lacking = _PAIRS if weights == _BFLOAT16 else "products of float16"
        reason = f"there are no {lacking}; weights are widened in registers"
    best = _BFLOAT16 if weights == _BFLOAT16 and products else _FLOAT32
    return wanted or best, reason


def _numerics(compute: torch.dtype, backend: Backend, config: EngineConfig) -> str:
    parts = [f"version {NUMERICS_VERSION}"]
    if backend.digests is not None:
        paired = compute == _BFLOAT16 and backend.digests.pairs is not None
        digest = backend.digests.pairs if paired else backend.digests.float32
        how = "-tiles" if backend.digests.tiles else "-pairs"
        parts.append(f"cpu-compiled {name_of(compute)}{how if paired else ''} {digest}")
    elif backend.device.type != "cpu":
        parts += [f"triton {triton_version()} sums {TRITON_SUMS}", *_unusual_forms(backend.device)]
        ranks, library = config.tensor_parallel_size, config.gpu_kernels
        parts += filter(None, [named(library, ranks=ranks, deterministic=config.deterministic)])
    else:
        parts.append(_PLAIN)
    parts.append(f"{_torch(backend)} {_capability(backend.device)}")
    if config.tensor_parallel_size > 1:
        parts.append(f"{config.tensor_parallel_size} ranks, float32 sums in their order")
    return ", ".join(parts + ["batch-invariant"] * config.deterministic)


def _torch(backend: Backend) -> str:
    """Name the torch that computes the operations without kernels of this project.

    Builds of one release differ in their local version: "+cpu", "+cu130". Beside compiled kernels
    torch has little left: frequencies, positions, the decays of a Gated DeltaNet, the attention of
    towers that are not compiled. All of that runs on the CPU, where commit, compiler and libraries
    decide the bits, and those name the build there. So a cache stays warm when a CPU build replaces
    one with CUDA. Where torch computes everything, the build is named as it is.
    """
    if not backend.compiled:
        return f"torch {torch.__version__}"
    return f"torch {torch.__version__.split('+')[0]} {_cpu_build()}"


def _cpu_build() -> str:
    """Digest the origin of torch's code for CPUs: 8 hexadecimal digits.

    The lines down to the processor's capability list compiler and libraries. The lines behind them
    list GPUs and flags; builds that differ only there compute the same bits.
    """
    lines = takewhile(
        lambda line: "CPU capability" not in line, torch.__config__.show().split("\n")
    )
    build = "\n".join((str(torch.version.git_version), *lines))
    return hashlib.blake2b(build.encode(), digest_size=4).hexdigest()


def _capability(device: torch.device) -> str:
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability()
    if not torch.cuda.is_available():
        return "GPU"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _unusual_forms(device: torch.device) -> list[str]:
    """Return what gives kernels other bits on a GPU: forms that avoid known faults of Triton, and
    the table of its tiles."""
    architecture = tuning.architecture_of(device)
    if architecture is None:
        return []
    tiles = tuning.digest(architecture)
    check_table(architecture)
    return [*forms_at(architecture, triton_version()), *([f"tiles {tiles}"] if tiles else [])]


def with_plain_ops(arithmetic: Arithmetic) -> Arithmetic:
    """Return an arithmetic of compiled kernels whose steps run op by op: plain torch computes the
    ops, or the sizes of this model, that they do not."""
    return replace(arithmetic, numerics=f"{arithmetic.numerics}, {_PLAIN}")


def with_checked_kernels(arithmetic: Arithmetic, digest: str) -> Arithmetic:
    """Return an arithmetic with the digest of what the kernels compute (see `check_kernels`).

    Binaries of the same sources differ with driver, assembler and card. Equal names then still
    mean equal bits.
    """
    return replace(arithmetic, numerics=f"{arithmetic.numerics}, kernels {digest}")


def factors_dtype(config: EngineConfig) -> torch.dtype | None:
    """Return the dtype of adapters' factors in memory; None: as their files have them."""
    return DTYPES.get(config.lora_dtype)
