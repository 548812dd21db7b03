"""`vlm-serve doctor`: reports the hardware, and which arithmetic and kernels would run and why."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version

import torch

from vlm_serve.engine.numerics.arithmetic import decide, name_of
from vlm_serve.engine.numerics.invariance import promise
from vlm_serve.engine.steps.memory import free_host_memory
from vlm_serve.engine.steps.step_paths import find_backend
from vlm_serve.kernels import native_build, native_kept, native_library
from vlm_serve.kernels.native_build import BuildError
from vlm_serve.kernels.native_processor import processor_name
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import format_size
from vlm_serve.system.version import __version__

PACKAGES = ("torch", "triton", "transformers", "pillow", "av", "blake3", "fastapi", "uvicorn")
INSTRUCTIONS = {
    "__AVX2__": "AVX2",
    "__AVX512F__": "AVX-512",
    "__AVX512VNNI__": "AVX512-VNNI",
    "__AVX512BF16__": "AVX512-BF16",
    "__AVXVNNI__": "AVX-VNNI",
    "__AMX_BF16__": "AMX-BF16",
    "__AMX_INT8__": "AMX-INT8",
    "__ARM_NEON": "NEON",
    "__ARM_FEATURE_DOTPROD": "NEON dot products",
    "__ARM_FEATURE_MATMUL_INT8": "NEON int8 matrices",
}
"""Compiler macros of the instruction sets with kernels -> their names."""

_CHECKPOINTS = (torch.bfloat16, torch.float32)
"""Weight types of checkpoints."""


def run(*, as_json: bool) -> None:
    """Print the report. Nothing is built."""
    report = examine()
    if as_json:
        print(json.dumps(report))
        return
    width = max(map(len, report))
    print("\n".join(f"{name:<{width}}  {text}" for name, text in report.items()))


def examine() -> dict[str, str]:
    """Describe everything that decides what runs: topic -> text."""
    return {
        "vlm-serve": f"{__version__}, Python {platform.python_version()}",
        "processor": f"{processor_name()}, {os.cpu_count()} threads",
        "memory": f"{format_size(free_host_memory())} free",
        "compiler": _compiler(),
        "kernels": _kernels(),
        "GPU": _gpu(),
        **{f"{name_of(kind)} checkpoint": _what_runs(kind) for kind in _CHECKPOINTS},
        "batch-invariant": _promise(),
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
    }


def _compiler() -> str:
    """Describe the compiler and the instruction sets it would compile for."""
    try:
        how = native_build.recipe()
        deadline = time.monotonic() + native_build.TIME_LIMIT_S
        macros = native_build.instructions(how, deadline)
    except BuildError as error:
        return f"none usable: {error}"
    names = [name for macro, name in INSTRUCTIONS.items() if macro in macros]
    return f"{how.compiler} -march={how.arch}: {', '.join(names) or 'no vector instructions'}"


def _kernels() -> str:
    carried = native_library.shipped()
    if carried is not None:
        return f"of the installed wheel, for {carried.arch}: {carried.path}"
    try:
        how = native_build.recipe()
        kept, path = native_kept.is_kept(how), how.path()
    except BuildError:
        return "none: torch computes"
    except OSError as error:
        return f"built at every start, in a temporary folder: {error}"
    return (
        f"built, in {path}"
        if kept
        else f"not built yet: the first start builds them, in {path.parent}"
    )


def _gpu() -> str:
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda or torch.version.hip else "; this is a CPU build of torch"
        return f"none{built}"
    cards = []
    for index in range(torch.cuda.device_count()):
        free, _ = torch.cuda.mem_get_info(index)
        cards.append(f"{torch.cuda.get_device_name(index)}, {format_size(free)} free")
    return "; ".join(cards)


def _what_runs(checkpoint: torch.dtype) -> str:
    config, device = EngineConfig(), _device()
    chosen = decide(config, checkpoint, find_backend(config, device, build=False))
    names = chosen.types.names()
    return f"on the {device.type}, computed in {names['compute']}: {chosen.reason}"


def _promise() -> str:
    """Describe independence of batches and hits, without and with the option for it."""
    config, device = EngineConfig(), _device()
    compiled = find_backend(config, device, build=False).compiled
    now = promise(device, compiled=compiled, wanted=False)
    wanted = promise(device, compiled=compiled, wanted=True)
    return str(now) if now == wanted else f"{now}; with --batch-invariant {wanted}"


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
