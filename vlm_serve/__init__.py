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
    """Have the command line import nothing from the current folder, unless it is told to.

    `python -m` has Python look there before anything else, and so has an empty entry of PYTHONPATH,
    such as a colon too many leaves. Python has looked up a few modules of its own there by then,
    but none of ours, which are found below this package. Another program keeps its path.
    """
    begins = sys.argv[:1] == ["-m"]  # Until the module has been found; then it is the file's name.
    if not (_runs_module() if begins else os.path.basename("".join(sys.argv[:1])) == "vlm-serve"):
        return
    named = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    entries = named.split(os.pathsep) if named else []
    with contextlib.suppress(FileNotFoundError, ValueError):  # A folder that was removed.
        here = os.getcwd()
        if begins and not sys.flags.safe_path and sys.path[:1] == [here]:
            del sys.path[0]
        if "" in entries and here not in map(os.path.abspath, filter(None, entries)):
            sys.path.remove(here)


def _runs_module() -> bool:
    """Return whether the module that `python -m` is to run is one of this package."""
    option = sys.orig_argv[-len(sys.argv)]  # A word of its own, or it stands behind the `m`.
    module = option.partition("m")[2] if option.startswith("-") else option
    return module.partition(".")[0] == __name__


_forget_current_folder()
