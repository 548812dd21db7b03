"""vlm-serve: serves hybrid vision-language models and reuses what it has computed.

The names below are imported on first use, so that `import vlm_serve` costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_serve.config import EngineConfig
    from vlm_serve.engine.outputs import CacheReport, Delta, Usage
    from vlm_serve.errors import VlmServeError
    from vlm_serve.pipeline import Output, Pipeline
    from vlm_serve.sampling_params import SamplingParams

__all__ = [
    "CacheReport",
    "Delta",
    "EngineConfig",
    "Output",
    "Pipeline",
    "SamplingParams",
    "Usage",
    "VlmServeError",
]

_HOME = {
    "CacheReport": "vlm_serve.engine.outputs",
    "Delta": "vlm_serve.engine.outputs",
    "EngineConfig": "vlm_serve.config",
    "Output": "vlm_serve.pipeline",
    "Pipeline": "vlm_serve.pipeline",
    "SamplingParams": "vlm_serve.sampling_params",
    "Usage": "vlm_serve.engine.outputs",
    "VlmServeError": "vlm_serve.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vlm_serve' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def _forget_current_folder() -> None:
    """Undo what `python -m vlm_serve.MODULE` does: it has Python import from the current folder
    before anything else. Python has looked up a few modules of its own there by then, but none of
    ours, which are found below this package. Another program keeps its path."""
    if sys.argv[:1] != ["-m"] or sys.flags.safe_path:
        return  # Until the module has been found; then it is the file's name.
    option = sys.orig_argv[-len(sys.argv)]  # The module, in a word of its own or behind the `m`.
    module = option.partition("m")[2] if option.startswith("-") else option
    with contextlib.suppress(FileNotFoundError):  # A folder that was removed.
        if module.partition(".")[0] == __name__ and sys.path[:1] == [os.getcwd()]:
            del sys.path[0]


_forget_current_folder()
