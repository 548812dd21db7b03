"""Ways to make steps cheaper to launch: CUDA graphs on a GPU, compiled kernels on a CPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from vlm_serve.engine.features.adapters.options import serves_adapters
from vlm_serve.engine.numerics.arithmetic import Backend
from vlm_serve.engine.steps.adapter_table import AdapterTable, SlotSizes
from vlm_serve.engine.steps.draft_graphs import DraftGraphs
from vlm_serve.engine.steps.step_graphs import StepGraphs, StepLimits, StepResults
from vlm_serve.engine.steps.step_sizes import (
    CapturedRows,
    decode_sizes,
    pass_sizes,
    prefill_sizes,
    verify_sizes,
)
from vlm_serve.engine.steps.step_tables import CaptureError, CudaGraphs, GraphDevice
from vlm_serve.engine.steps.tower_graphs import TowerGraphs, patch_sizes
from vlm_serve.errors import ConfigError
from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.kernels.native_build import BuildError
from vlm_serve.kernels.native_library import build_own, digests, foreseen
from vlm_serve.models import Model
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.program import UnsupportedError
from vlm_serve.options.config import EngineConfig

_log = logging.getLogger(__name__)


def graphs_wanted(option: bool | None, device: torch.device, ranks: int = 1) -> bool:
    """Return True if short steps are to run from CUDA graphs.

    Raises:
        ConfigError: the option requests them without a GPU, or with several ranks.
    """
    if ranks > 1:
        if option:
            problem = "cuda_graphs cannot capture the communication between ranks"
            raise ConfigError(problem, param="cuda_graphs")
        return False
    if option and device.type != "cuda":
        raise ConfigError(
            f"cuda_graphs needs a GPU, but the device is {device}", param="cuda_graphs"
        )
    return device.type == "cuda" if option is None else option


@dataclass(frozen=True, slots=True)
class Captured:
    """Captured graphs; none by default.

    Attributes:
        steps: of steps.
        drafts: of passes of the MTP layer; None: without it, or without graphs.
        tower: of the vision tower; None: without one, or without graphs of it.
        problem: why there are none although they were wanted.
    """

    steps: tuple[StepGraphs, ...] = ()
    drafts: DraftGraphs | None = None
    tower: TowerGraphs | None = None
    problem: str | None = None


def capture(
    model: Model, caches: CacheTensors, config: EngineConfig, max_model_len: int
) -> Captured:
    """Capture the graphs of short steps. Return none if this GPU or driver cannot capture them,
    unless the option requests them.

    Raises:
        ConfigError: the option requests graphs and they cannot be captured.
    """
    _log.info("capturing CUDA graphs of short steps, some seconds")
    try:
        with launching_on(caches.device):
            return _capture(model, caches, config, max_model_len)
    except RuntimeError as error:
        if config.cuda_graphs:
            raise ConfigError(f"cuda_graphs: {error}", param="cuda_graphs") from error
        _log.warning("steps run without CUDA graphs: %s", error)
        # Whoever asks for the engine's health need not hold a key: the rest is in the log.
        step = error.step if isinstance(error, CaptureError) else "a step"
        return Captured(problem=f"steps run without CUDA graphs: {step} could not be captured")


def _capture(
    model: Model, caches: CacheTensors, config: EngineConfig, max_model_len: int
) -> Captured:
    assert config.block_size is not None
    device, rows = CudaGraphs(caches.device), CapturedRows.of(config)
    limits: StepLimits = {
        "block_size": config.block_size,
        "max_model_len": max_model_len,
        "device": device,
        "deterministic": config.deterministic,
        "results": StepResults(model, rows.most_logits, rows.most_tokens, caches.device),
    }
    most, drafts = config.max_num_seqs, config.speculative_tokens
    prompts = prefill_sizes(most, config.max_num_batched_tokens)
    prefills = StepGraphs(model, caches, prompts, **limits)
    adapters = _adapters(model, config, device)
    decodes = StepGraphs(model, caches, decode_sizes(most), **limits, adapters=adapters)
    patches = patch_sizes(model.spec, config)
    tower = TowerGraphs(model, sizes=patches, device=device) if patches else None
    if config.speculative == "off":
        return Captured((prefills, decodes), tower=tower)
    verifies = StepGraphs(model, caches, verify_sizes(most, drafts), **limits, adapters=adapters)
    passes = pass_sizes(most, drafts)
    return Captured(
        (prefills, decodes, verifies),
        DraftGraphs(model, caches, passes, **limits) if model.drafts else None,
        tower,
    )


def _adapters(model: Model, config: EngineConfig, device: GraphDevice) -> AdapterTable | None:
    """Return the slots of adapters, if there are any now or later: a second set of graphs takes
    time and memory."""
    if not serves_adapters(config):
        return None
    return AdapterTable(SlotSizes.of_config(model.modules, config), device, model.device)


def find_backend(config: EngineConfig, device: torch.device, *, build: bool = True) -> Backend:
    """Find the kernels that compute on a device.

    Args:
        config: options.
        device: the device.
        build: build compiled kernels if this machine has none yet; if False, predict the result of
            the compiler instead.

    Raises:
        ConfigError: the options request compiled kernels, or a build of them, that cannot be had.
    """
    if config.compiled_kernels and device.type != "cpu":
        raise ConfigError(
            f"compiled_kernels are for a CPU, but the device is {device}", param="compiled_kernels"
        )
    if device.type != "cpu" or config.compiled_kernels is False:
        return Backend(device)
    if config.native_kernels == "build":
        try:
            build_own()
        except BuildError as error:
            raise ConfigError(f"native_kernels: {error}", param="native_kernels") from error
    try:
        return Backend(device, digests() if build else foreseen())
    except BuildError as error:
        if config.compiled_kernels:
            raise ConfigError(f"compiled_kernels: {error}", param="compiled_kernels") from error
        if build:
            _log.warning("there are no compiled kernels: %s", error)
        return Backend(device, problem=str(error))


def compile_steps(model: Model, caches: CacheTensors) -> bool:
    """Let the model compute whole steps over these pools in compiled code; return whether it
    can."""
    try:
        model.compile_steps(caches)
    except UnsupportedError as error:
        _log.warning("steps are not compiled as a whole: %s", error)
        return False
    return True
