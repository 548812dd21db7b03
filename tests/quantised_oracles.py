"""The packages that write and read quantised checkpoints, as oracles: compressed-tensors,
AutoGPTQ's and AutoAWQ's layers, and transformers' own FP8.

AutoGPTQ and AutoAWQ no longer import beside today's transformers as a whole, so the modules that
pack and unpack are imported without what the packages import at their top.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import sys
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def dequantised(path: Path, target: Path) -> Path:
    """A float32 checkpoint of the same values, as transformers loads it: every weight comes out of
    the package whose format it has, in float32."""
    shutil.copytree(path, target)
    config = json.loads((path / "config.json").read_text())
    fields = config.pop("quantization_config")
    tensors = load_file(path / "model.safetensors")
    read = {
        "fp8": _float8,
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed,
        "modelopt": _modelopt,
    }[fields["quant_method"]]
    plain: Tensors = {}
    for module, own in _modules(tensors).items():
        if set(own) <= {"", "weight", "bias"} and not any(map(_is_float8, own.values())):
            plain |= {f"{module}.{name}".rstrip("."): each.float() for name, each in own.items()}
        else:
            inside = "weight" in {name.split("_")[0] for name in own} or "qweight" in own
            plain[f"{module}.weight" if inside else module] = read(own, fields, module).float()
            if "bias" in own:
                plain[f"{module}.bias"] = own["bias"].float()
    config["dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config))
    if "moe" in config["model_type"]:
        plain = experts_together(plain, transposed="vl" in config["model_type"])
    save_file(
        {name: each.contiguous() for name, each in plain.items()}, target / "model.safetensors"
    )
    return target


def _is_float8(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float8_e4m3fn


_SUFFIX = re.compile(
    r"\.(weight(_\w+)?|input_scale|bias|qweight|qzeros|scales|g_idx)$|(?<=proj)_(scale_inv)$"
)


def _modules(tensors: Tensors) -> dict[str, Tensors]:
    """Tensors by module and name in it; experts in one tensor have no name, or "scale_inv"."""
    found: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        match = _SUFFIX.search(name)
        module = name[: match.start()] if match else name
        found.setdefault(module, {})[name[len(module) :].lstrip("._")] = tensor
    return found


def experts_together(plain: Tensors, *, transposed: bool) -> Tensors:
    """As transformers has the experts of a layer: gate and up, and down, of all in one tensor."""
    found: Tensors = {}
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in plain.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name)
        if match:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            found[name] = tensor
    for layer, own in experts.items():
        count = range(1 + max(index for index, _ in own))
        both = torch.stack([torch.cat([own[each, "gate"], own[each, "up"]]) for each in count])
        down = torch.stack([own[each, "down"] for each in count])
        found[f"{layer}.gate_up_proj"] = both.transpose(1, 2) if transposed else both
        found[f"{layer}.down_proj"] = down.transpose(1, 2) if transposed else down
    return found


def _float8(own: Tensors, fields: dict[str, Any], module: str) -> torch.Tensor:
    """By transformers."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    weight = own["weight"] if "weight" in own else own[""]
    factors = own["weight_scale_inv"] if "weight" in own else own["scale_inv"]
    size = fields["weight_block_size"]
    plain: torch.Tensor = _dequantize_fp8_weight(weight, factors, size, torch.float32)
    return plain


def _gptq(own: Tensors, fields: dict[str, Any], module: str) -> torch.Tensor:
    """By AutoGPTQ's layer, applied to the unit matrix. It knows the first version alone: zero
    points of the second one are made those of the first."""
    depth, rows = 8 * own["qweight"].shape[0], own["qweight"].shape[1]
    layer = gptq_layer(fields["bits"], fields["group_size"], depth, rows)
    second = fields["checkpoint_format"] == "gptq_v2"
    layer.qzeros = own["qzeros"] - 0x11111111 if second else own["qzeros"]
    layer.qweight, layer.scales, layer.g_idx = own["qweight"], own["scales"].float(), own["g_idx"]
    with torch.no_grad():
        return torch.as_tensor(layer(torch.eye(depth))).T


def gptq_layer(bits: int, group: int, depth: int, rows: int) -> Any:
    """AutoGPTQ's layer in plain torch."""
    _bare("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    module = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda_old")
    vars(module)["_autogptq_cuda_available"] = False
    return module.QuantLinear(bits, group, depth, rows, False, weight_dtype=torch.float32)


def _awq(own: Tensors, fields: dict[str, Any], module: str) -> torch.Tensor:
    """By AutoAWQ."""
    _bare("awq", "awq.utils")
    packing = importlib.import_module("awq.utils.packing_utils")
    scales, bits, group = own["scales"].float(), fields["bits"], fields["group_size"]
    plain = packing.dequantize_gemm(own["qweight"], own["qzeros"], scales, bits, group)
    return torch.as_tensor(plain).T


def awq_layer() -> Any:
    """AutoAWQ's class of layers in its usual layout."""
    _bare("awq", "awq.utils", "awq.modules", "awq.modules.linear")
    device = ModuleType("awq.utils.utils")
    device.get_best_device = lambda: "cpu"  # type: ignore[attr-defined]
    sys.modules.setdefault(device.__name__, device)
    return importlib.import_module("awq.modules.linear.gemm").WQLinear_GEMM


def _compressed(own: Tensors, fields: dict[str, Any], module: str) -> torch.Tensor:
    """By compressed-tensors."""
    known = compressed_tensors()
    groups = known.QuantizationConfig.model_validate(fields).config_groups.values()
    scheme = next(each for each in groups if _targeted(module, each.targets))
    compressor = known.BaseCompressor.get_value_from_registry(scheme.format)
    if own["weight_packed" if "weight_packed" in own else "weight"].dtype == torch.uint8:
        return float4(own, scheme)
    own = {name: each.float() if name == "weight_scale" else each for name, each in own.items()}
    return torch.as_tensor(compressor.decompress(own, scheme)["weight"])


def float4(own: Tensors, scheme: Any) -> torch.Tensor:
    """By compressed-tensors' parts: as a whole it rounds to bfloat16."""
    known = compressed_tensors()
    compressor = known.BaseCompressor.get_value_from_registry(scheme.format)
    packed, wide = own["weight_packed"], torch.float32
    rows, half = packed.shape
    return torch.as_tensor(
        known.dequantize(
            known.unpack_fp4_from_uint8(packed, rows, 2 * half, dtype=wide),
            scale=compressor._decompress_scale(own["weight_scale"], wide),
            args=scheme.weights,
            global_scale=own.get("weight_global_scale"),
            dtype=wide,
        )
    )


def float4_scheme(kind: str) -> Any:
    """Of "nvfp4" or "mxfp4"."""
    known = compressed_tensors()
    size, strategy = {"nvfp4": (16, "tensor_group"), "mxfp4": (32, "group")}[kind]
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy}
    return known.QuantizationScheme(
        targets=["Linear"],
        weights=weights | {"group_size": size},
        format=f"{kind}-pack-quantized",
    )


def _modelopt(own: Tensors, fields: dict[str, Any], module: str) -> torch.Tensor:
    """FP8 by its definition, FP4 by compressed-tensors, which divides by what ModelOpt multiplies
    by."""
    if _is_float8(own["weight"]):
        return own["weight"].float() * own["weight_scale"]
    named = {
        "weight_packed": own["weight"],
        "weight_scale": own["weight_scale"],
        "weight_global_scale": 1 / own["weight_scale_2"].reshape(1),
    }
    return float4(named, float4_scheme("nvfp4"))


def _targeted(module: str, targets: Iterable[str]) -> bool:
    return any(
        each == "Linear" or re.match(each.removeprefix("re:"), module) is not None
        for each in targets
    )


@cache
def compressed_tensors() -> Any:
    """What is asked of compressed-tensors."""
    oracle.prepare_torchvision()
    pytest.importorskip("compressed_tensors")
    found = ModuleType("found")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressors = importlib.import_module("compressed_tensors.compressors")
        quantization = importlib.import_module("compressed_tensors.quantization")
        halves = importlib.import_module("compressed_tensors.compressors.nvfp4.helpers")
        forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
    found.BaseCompressor = compressors.BaseCompressor  # type: ignore[attr-defined]
    found.QuantizationConfig = quantization.QuantizationConfig  # type: ignore[attr-defined]
    found.QuantizationScheme = quantization.QuantizationScheme  # type: ignore[attr-defined]
    found.unpack_fp4_from_uint8 = halves.unpack_fp4_from_uint8  # type: ignore[attr-defined]
    found.dequantize = forward.dequantize  # type: ignore[attr-defined]
    return found


def _bare(*packages: str) -> None:
    """Makes modules of packages importable without running what the packages do at their top."""
    for name in packages:
        if name in sys.modules:
            continue
        parent, _, own = name.rpartition(".")
        if parent:
            folder = Path(sys.modules[parent].__path__[0]) / own
        else:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                pytest.skip(f"{name} is not installed")
            folder = Path(spec.origin).parent
        module = ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module
