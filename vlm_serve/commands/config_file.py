"""Config files: YAML with options of every command, and the model."""

from __future__ import annotations

from typing import Any

from vlm_serve.deploy.options import DeployConfig
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import from_mapping, options_of, read_mapping
from vlm_serve.server.config import ServerConfig

DEMO_MODEL = "demo"
"""The model unless a flag, a variable or a config file names one."""
ALL_OPTIONS = (
    *options_of(DeployConfig),
    *options_of(ServerConfig),
    *options_of(EngineConfig),
)


def read_config_file(path: str | None) -> dict[str, Any]:
    """Return the options in a YAML file, and its `model` if it has one; nothing without a path.

    Raises:
        ConfigError: the file cannot be read, or names something that is no option.
    """
    if path is None:
        return {}
    expected = "it must map options to values"
    content = read_mapping(path, f"config file {path}", "config", expected)
    model = content.pop("model", None)
    options = from_mapping(ALL_OPTIONS, content)
    return options | ({} if model is None else {"model": model})
