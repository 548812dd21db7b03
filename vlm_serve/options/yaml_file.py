"""Reads YAML files that users name in options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlm_serve.errors import ConfigError


def read_mapping(path: str, place: str, param: str, expected: str) -> dict[Any, Any]:
    """Return the mapping in a YAML file.

    Args:
        place: start of the error messages, with the path.
        param: the option that names the file.
        expected: the complaint about a file without a mapping.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not valid YAML"
        raise ConfigError(f"{place}: {reason}", param=param) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{place}: {expected}", param=param)
    return content
