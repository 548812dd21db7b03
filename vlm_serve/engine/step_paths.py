"""What makes steps cheaper to launch: CUDA graphs on a GPU, compiled kernels on a CPU."""

from __future__ import annotations

import logging
import threading

import torch

from vlm_serve.config import EngineConfig
from vlm_serve.engine.decode_graphs import CudaCapture, DecodeGraphs
from vlm_serve.errors import ConfigError
from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.kernels.native_build import BuildError
from vlm_serve.kernels.native_library import load
from vlm_serve.models import Model
from vlm_serve.models.batch import CacheTensors
from vlm_serve.models.small_step_program import UnsupportedError

_log = logging.getLogger(__name__)


def graphs_wanted(option: bool | None, device: torch.device) -> bool:
    """Whether decode steps are to run from CUDA graphs.

    Raises:
        ConfigError: they were asked for by name without a GPU.
    """
    if option and device.type != "cuda":
        raise ConfigError(
            f"cuda_graphs needs a GPU, but the device is {device}", param="cuda_graphs"
        )
    return device.type == "cuda" if option is None else option


def decode_graphs(
    model: Model, caches: CacheTensors, config: EngineConfig, max_model_len: int
) -> DecodeGraphs | None:
    """None if they were not asked for by name and this GPU or driver cannot capture them."""
    assert config.block_size is not None
    try:
        with launching_on(caches.kv.device):
            return DecodeGraphs(
                model,
                caches,
                block_size=config.block_size,
                max_model_len=max_model_len,
                max_num_seqs=config.max_num_seqs,
                capture=CudaCapture(),
            )
    except RuntimeError as error:
        if config.cuda_graphs:
            raise ConfigError(f"cuda_graphs: {error}", param="cuda_graphs") from error
        _log.warning("decode runs without CUDA graphs: %s", error)
        return None


def compile_wanted(option: bool | None, device: torch.device) -> bool:
    """Whether the model is to use compiled kernels. If so, the compiler starts now, beside the
    loading of the checkpoint.

    Raises:
        ConfigError: they were asked for by name on a GPU.
    """
    if option and device.type != "cpu":
        raise ConfigError(
            f"compiled_kernels are for a CPU, but the device is {device}", param="compiled_kernels"
        )
    wanted = device.type == "cpu" and option is not False
    if wanted:
        threading.Thread(target=_build_early, daemon=True).start()
    return wanted


def _build_early() -> None:
    try:
        load()
    except BuildError:
        return  # `use_compiled` meets it again.


def use_compiled(model: Model, caches: CacheTensors, config: EngineConfig) -> bool:
    """Has the model use compiled kernels over these pools, and says whether it does.

    Raises:
        ConfigError: they were asked for by name and cannot be had.
    """
    try:
        model.use_compiled_kernels()
        model.compile_small_steps(caches)
    except BuildError as error:
        if config.compiled_kernels:
            raise ConfigError(f"compiled_kernels: {error}", param="compiled_kernels") from error
        _log.warning("there are no compiled kernels: %s", error)
        return False
    except UnsupportedError as error:
        _log.warning("steps of few tokens are not compiled: %s", error)
    return True
