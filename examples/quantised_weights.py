"""Quantised forms of a random checkpoint's weights, in the layouts of published checkpoints.

Values are simply rounded: the weights serve tests and benchmarks alone. Unquantised modules of each
format, and the wording of its config, follow published files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

DENSE = re.compile(
    r"(.*\.)?(visual|embed_tokens|lm_head|conv1d|gate|shared_expert_gate|in_proj_(a|b|ba))(\..*)?"
)
"""Modules that no format quantises: as in the lists of published checkpoints."""
_MLP = re.compile(r".*\.mlp\..*")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_BLOCK = 128


@dataclass(frozen=True)
class Quantised:
    """Writer of a format: its weights `[N, K]` by module name, and its config.

    `algorithm` names the format of a module in configs that list every module.
    """

    write: Callable[[str, torch.Tensor, int], Tensors]
    config: Callable[[list[str], int], dict[str, Any]]
    fused: bool = False
    algorithm: Callable[[str], str] | None = None


def quantise_weights(
    weights: Mapping[str, torch.Tensor], kind: str, group: int, *, transposed: bool = False
) -> Tensors:
    """Return the checkpoint's tensors, with the projections of its decoder quantised.

    Args:
        weights: from `make_checkpoint`; all kinds but "fp8-fused" split fused experts.
        kind: one of FORMATS.
        group: values per scale, for formats with groups.
        transposed: fused experts store the weights' columns as rows.

    Raises:
        ValueError: a weight does not fit the format; the message names it.
    """
    chosen, found = FORMATS[kind], {}
    for name, weight in weights.items():
        for own, part in _apart(name, weight, chosen.fused, transposed):
            found.update(_written(own, part, chosen, group, kind))
    return found


def quantization_config(
    weights: Mapping[str, torch.Tensor], kind: str, group: int
) -> dict[str, Any]:
    """Return the quantization part of config.json."""
    kept = [
        name.removesuffix(".weight")
        for name, weight in weights.items()
        if weight.ndim >= 2 and not _chosen(name, weight)
    ]
    fields, algorithm = FORMATS[kind].config(kept, group), FORMATS[kind].algorithm
    if algorithm is not None:
        fields["quantized_layers"] = {
            own.removesuffix(".weight"): {"quant_algo": algorithm(own)}
            for name, weight in weights.items()
            if _chosen(name, weight)
            for own, _ in _apart(name, weight, False, False)
        }
    return fields


def _written(name: str, weight: torch.Tensor, chosen: Quantised, group: int, kind: str) -> Tensors:
    module = name.removesuffix(".weight")
    if not _chosen(name, weight) or (kind == "gptq-mlp" and not _official(module)):
        return {name: weight}
    try:
        return chosen.write(name, weight, group)
    except RuntimeError as error:
        raise ValueError(f"{name} does not fit {kind} in groups of {group}: {error}") from error


def _chosen(name: str, weight: torch.Tensor) -> bool:
    experts = ".experts." in name
    matrix = weight.ndim == (3 if experts and not name.endswith(".weight") else 2)
    return matrix and not DENSE.fullmatch(name.removesuffix(".weight"))


def _official(module: str) -> bool:
    """Return True if the published GPTQ checkpoints of Qwen3.5 quantise the module."""
    skipped = "shared_expert" in module or module.startswith("mtp.")
    return bool(_MLP.fullmatch(module)) and not skipped


def _apart(
    name: str, weight: torch.Tensor, fused: bool, transposed: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Split a weight of fused experts into one per expert; others stay whole."""
    place, _, kind = name.rpartition(".")
    if fused or not place.endswith(".experts"):
        yield name, weight
        return
    for index, each in enumerate(weight.transpose(1, 2) if transposed else weight):
        if kind == "down_proj":
            yield f"{place}.{index}.down_proj.weight", each
        else:
            for own, half in zip(("gate", "up"), each.chunk(2), strict=True):
                yield f"{place}.{index}.{own}_proj.weight", half


def _codes(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return uint8 codes `[N, K]`, float16-exact scales and uint8 zero points `[N, K / group]`."""
    grouped = weight.float().reshape(weight.shape[0], -1, group)
    top = (1 << bits) - 1
    if symmetric:
        scale = grouped.abs().amax(-1) / (top // 2)
        zero = torch.full_like(scale, 1 << (bits - 1))
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round().clamp(0, top)
    # A scale that is exact in float16 and bfloat16.
    scale = scale.bfloat16().clamp(min=2.0**-14)
    codes = (grouped / scale.float()[..., None]).round() + zero[..., None]
    return codes.clamp(0, top).flatten(1).byte(), scale, zero.byte()


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 codes `[..., n]` into int32 `[..., n * bits / 32]`, the first in the low bits."""
    each = 32 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, each).long()
    shifts = torch.arange(each) * bits
    whole = (parts << shifts).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def _gptq(offset: int) -> Callable[[str, torch.Tensor, int], Tensors]:
    def write(name: str, weight: torch.Tensor, group: int) -> Tensors:
        codes, scale, zero = _codes(weight, 4, group, symmetric=True)
        module = name.removesuffix(".weight")
        return {
            f"{module}.qweight": _words(codes, 4).T.contiguous(),
            f"{module}.qzeros": _words(zero.T - offset, 4),
            f"{module}.scales": scale.half().T.contiguous(),
            f"{module}.g_idx": (torch.arange(codes.shape[1]) // group).int(),
        }

    return write


def _awq(name: str, weight: torch.Tensor, group: int) -> Tensors:
    codes, scale, zero = _codes(weight, 4, group, symmetric=False)
    module = name.removesuffix(".weight")

    def ordered(values: torch.Tensor) -> torch.Tensor:
        words = values.T.reshape(values.shape[1], -1, 8)
        return _words(words[..., list(_AWQ_ORDER)].flatten(-2), 4)

    return {
        f"{module}.qweight": ordered(codes),
        f"{module}.qzeros": ordered(zero),
        f"{module}.scales": scale.half().T.contiguous(),
    }


def _packed(bits: int, *, symmetric: bool = True) -> Callable[[str, torch.Tensor, int], Tensors]:
    def write(name: str, weight: torch.Tensor, group: int) -> Tensors:
        rows, depth = weight.shape
        codes, scale, zero = _codes(weight, bits, group, symmetric=symmetric)
        found = {
            f"{name}_packed": _words(codes, bits),
            f"{name}_scale": scale,
            f"{name}_shape": torch.tensor([rows, depth]),
        }
        if not symmetric:
            found[f"{name}_zero_point"] = _words(zero.T, bits).T.contiguous()
        return found

    return write


def _float8_blocks(name: str, weight: torch.Tensor, group: int) -> Tensors:
    del group
    rows, depth = weight.shape[-2:]
    outer, grid = weight.shape[:-2], (-(-rows // _BLOCK), -(-depth // _BLOCK))
    wide = weight.new_zeros(*outer, grid[0] * _BLOCK, grid[1] * _BLOCK, dtype=torch.float32)
    wide[..., :rows, :depth] = weight
    blocks = wide.view(*outer, grid[0], _BLOCK, grid[1], _BLOCK)
    scale = (blocks.abs().amax((-3, -1)) / 448).bfloat16().clamp(min=2.0**-60)
    codes = (blocks / scale.float()[..., :, None, :, None]).clamp(-448, 448)
    codes = codes.reshape(wide.shape)[..., :rows, :depth].to(torch.float8_e4m3fn)
    return {name: codes.contiguous(), f"{name}_scale_inv": scale}


def _float8_channels(name: str, weight: torch.Tensor, group: int) -> Tensors:
    del group
    scale = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16().clamp(min=2.0**-60)
    codes = (weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale": scale}


def _mixed(name: str, weight: torch.Tensor, group: int) -> Tensors:
    return (_packed(4) if _MLP.fullmatch(name) else _float8_channels)(name, weight, group)


def _float4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return uint8 `[N, K / 2]` e2m1 codes, first in the low bits, and scales `[N, K / group]`."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grouped = weight.float().reshape(*scale.shape, -1) / scale[..., None].clamp(min=2.0**-126)
    between = (numbers[1:] + numbers[:-1]) / 2
    codes = torch.bucketize(grouped.abs(), between, out_int32=True)
    pairs = (codes + 8 * grouped.signbit()).byte().view(len(codes), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def _nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, e4m3 scales `[N, K / 16]` and the factor of the scales."""
    top = weight.float().reshape(weight.shape[0], -1, 16).abs().amax(-1) / 6
    whole = (top.amax() / 448).clamp(min=2.0**-100)
    scale = (top / whole).to(torch.float8_e4m3fn)
    return _float4(weight, scale.float() * whole), scale, whole


def _nvfp4_packed(name: str, weight: torch.Tensor, group: int) -> Tensors:
    del group
    codes, scale, whole = _nvfp4(weight)
    named = {"packed": codes, "scale": scale, "global_scale": 1 / whole.reshape(1)}
    return {f"{name}_{each}": tensor for each, tensor in named.items()}


def _nvfp4_modelopt(name: str, weight: torch.Tensor, group: int) -> Tensors:
    del group
    codes, scale, whole = _nvfp4(weight)
    module = name.removesuffix(".weight")
    return {
        name: codes,
        f"{name}_scale": scale,
        f"{name}_scale_2": whole,
        f"{module}.input_scale": torch.tensor(1.0),
    }


def _mixed_modelopt(name: str, weight: torch.Tensor, group: int) -> Tensors:
    if _MLP.fullmatch(name):
        return _nvfp4_modelopt(name, weight, group)
    scale = (weight.float().abs().amax() / 448).clamp(min=2.0**-60)
    codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    one = {f"{name.removesuffix('.weight')}.input_scale": torch.tensor(1.0)}
    return {name: codes, f"{name}_scale": scale} | one


def _mxfp4(name: str, weight: torch.Tensor, group: int) -> Tensors:
    del group
    top = weight.float().reshape(weight.shape[0], -1, 32).abs().amax(-1) / 6
    exponents = torch.frexp(top)[1].clamp(-126, 126)
    codes = _float4(weight, torch.ldexp(torch.ones_like(top), exponents))
    return {f"{name}_packed": codes, f"{name}_scale": (exponents + 127).byte()}


def _float8_config(kept: list[str], group: int) -> dict[str, Any]:
    del group
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": kept,
    }


def _gptq_config(version: str) -> Callable[[list[str], int], dict[str, Any]]:
    def config(kept: list[str], group: int) -> dict[str, Any]:
        skipped = [f"-:.*{re.escape(name)}$" for name in kept]
        return _gptq_fields(version, group) | {"dynamic": dict.fromkeys(skipped, {})}

    return config


def _gptq_mlp_config(kept: list[str], group: int) -> dict[str, Any]:
    """Return the rules of the published checkpoints, word for word."""
    del kept
    names = ("lm_head", "model.language_model.embed_tokens")
    skipped = ("attn", "shared_expert", "mtp", "visual")
    rules: dict[str, Any] = dict.fromkeys([*names, *(f"-:.*{each}.*" for each in skipped)], {})
    return _gptq_fields("gptq", group) | {"dynamic": rules}


def _gptq_fields(version: str, group: int) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": version,
        "lm_head": False,
    }


def _awq_config(kept: list[str], group: int) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": kept,
    }


def _compressed(*groups: Callable[[int], dict[str, Any]]) -> Callable[[list[str], int], Any]:
    def config(kept: list[str], group: int) -> dict[str, Any]:
        made = [each(group) for each in groups]
        formats = {each["format"] for each in made}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {f"group_{index}": each for index, each in enumerate(made)},
            "ignore": kept,
            "kv_cache_scheme": None,
        }

    return config


def _integer_group(
    bits: int, *, symmetric: bool = True, targets: str = "Linear"
) -> Callable[[int], dict[str, Any]]:
    def group_of(group: int) -> dict[str, Any]:
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
        return {
            "targets": [targets],
            "format": "pack-quantized",
            "weights": weights | {"strategy": "group", "group_size": group},
            "input_activations": None,
        }

    return group_of


def _float8_group(group: int) -> dict[str, Any]:
    del group
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "targets": ["Linear"],
        "format": "float-quantized",
        "weights": float8 | {"strategy": "channel", "dynamic": False},
        "input_activations": float8 | {"strategy": "token", "dynamic": True},
    }


def _float4_group(name: str, size: int, strategy: str) -> Callable[[int], dict[str, Any]]:
    def group_of(group: int) -> dict[str, Any]:
        del group
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
        weights |= {"strategy": strategy, "group_size": size}
        return {
            "targets": ["Linear"],
            "format": f"{name}-pack-quantized",
            "weights": weights,
            "input_activations": None,
        }

    return group_of


def _modelopt_config(algorithm: str) -> Callable[[list[str], int], dict[str, Any]]:
    def config(kept: list[str], group: int) -> dict[str, Any]:
        del group
        return {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "ignore": [*kept, "model.visual*"],
            "producer": {"name": "modelopt", "version": "0.41.0"},
        }

    return config


FORMATS = {
    "fp8": Quantised(_float8_blocks, _float8_config),
    "fp8-fused": Quantised(_float8_blocks, _float8_config, fused=True),
    "gptq": Quantised(_gptq(1), _gptq_config("gptq")),
    "gptq-v2": Quantised(_gptq(0), _gptq_config("gptq_v2")),
    "gptq-mlp": Quantised(_gptq(1), _gptq_mlp_config),
    "awq": Quantised(_awq, _awq_config),
    "int4": Quantised(_packed(4), _compressed(_integer_group(4))),
    "int4-asymmetric": Quantised(
        _packed(4, symmetric=False), _compressed(_integer_group(4, symmetric=False))
    ),
    "int8": Quantised(_packed(8), _compressed(_integer_group(8))),
    "fp8-channel": Quantised(_float8_channels, _compressed(_float8_group)),
    "mixed": Quantised(
        _mixed, _compressed(_integer_group(4, targets=r"re:.*\.mlp\..*"), _float8_group)
    ),
    "nvfp4": Quantised(_nvfp4_packed, _compressed(_float4_group("nvfp4", 16, "tensor_group"))),
    "nvfp4-modelopt": Quantised(_nvfp4_modelopt, _modelopt_config("NVFP4")),
    "mixed-modelopt": Quantised(
        _mixed_modelopt,
        _modelopt_config("MIXED_PRECISION"),
        algorithm=lambda name: "W4A16_NVFP4" if _MLP.fullmatch(name) else "FP8",
    ),
    "mxfp4": Quantised(_mxfp4, _compressed(_float4_group("mxfp4", 32, "group"))),
}
"""By what `--quantization` calls them; those without another name are compressed-tensors'."""
