"""Options of adapters: those that are loaded at start, and engines that cannot serve any."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from vlm_serve.errors import ConfigError, InvalidRequestError
from vlm_serve.options.config import EngineConfig

NAME = re.compile(r"[\w.:/+-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LoRA:
    """An adapter to load.

    Attributes:
        name: under which requests ask for it.
        path: folder in PEFT's form, a GGUF file, or a hub id.
    """

    name: str
    path: str | Path

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise InvalidRequestError(
                "an adapter's name must be 1 to 128 letters, digits or _.:/+-", param="lora_name"
            )


def named_adapters(config: EngineConfig, taken: Collection[str] = ()) -> list[LoRA]:
    """Return the config's adapters.

    Raises:
        ConfigError: one is not of the form name=path, or a name comes twice or is taken.
    """
    adapters: dict[str, LoRA] = {}
    for setting in config.lora_modules:
        name, equals, path = setting.partition("=")
        if not equals or not path or not NAME.fullmatch(name):
            raise ConfigError(
                f"lora_modules must be of the form name=path, got {setting!r}", param="lora_modules"
            )
        if name in taken:
            raise ConfigError(
                f"lora_modules: {name!r} is a name of the model", param="lora_modules"
            )
        if name in adapters:
            raise ConfigError(f"lora_modules names {name!r} twice", param="lora_modules")
        adapters[name] = LoRA(name, path)
    return list(adapters.values())


def serves_adapters(config: EngineConfig) -> bool:
    """Tell whether an engine captures and compiles steps with adapters."""
    return bool(config.lora_modules) or config.reserve_loras


def changed_experts(config: EngineConfig) -> tuple[str, ...]:
    """Return the weights of routed experts open to adapters."""
    chosen = config.lora_experts
    if chosen == "all":
        return "gate_up_proj", "down_proj"
    return () if chosen == "none" else (chosen,)
