"""vlm-serve: a server for hybrid vision-language models with prefix caching of text and media.

The names below are imported on first use, so `import vlm_serve` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vlm_serve.system.child import PACKAGE_FOLDER, forget_current_folder
from vlm_serve.system.links import find_problem
from vlm_serve.system.version import __version__

if TYPE_CHECKING:
    from vlm_serve.engine.features.adapters.options import LoRA
    from vlm_serve.engine.requests.outputs import CacheReport, Delta, Usage
    from vlm_serve.errors import FailedItemsError, VlmServeError
    from vlm_serve.options.config import EngineConfig
    from vlm_serve.pipeline.output import Choice, Output
    from vlm_serve.pipeline.pipeline import Answer, Pipeline
    from vlm_serve.sampling_params import SamplingParams
    from vlm_serve.structured_outputs import StructuredOutputs

__all__ = [
    "Answer",
    "CacheReport",
    "Choice",
    "Delta",
    "EngineConfig",
    "FailedItemsError",
    "LoRA",
    "Output",
    "Pipeline",
    "SamplingParams",
    "StructuredOutputs",
    "Usage",
    "VlmServeError",
    "__version__",
]

_HOME = {
    "Answer": "vlm_serve.pipeline",
    "CacheReport": "vlm_serve.engine.requests.outputs",
    "Choice": "vlm_serve.pipeline",
    "Delta": "vlm_serve.engine.requests.outputs",
    "EngineConfig": "vlm_serve.options.config",
    "FailedItemsError": "vlm_serve.errors",
    "LoRA": "vlm_serve.engine.features.adapters.options",
    "Output": "vlm_serve.pipeline",
    "Pipeline": "vlm_serve.pipeline",
    "SamplingParams": "vlm_serve.sampling_params",
    "StructuredOutputs": "vlm_serve.structured_outputs",
    "Usage": "vlm_serve.engine.requests.outputs",
    "VlmServeError": "vlm_serve.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vlm_serve' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__


forget_current_folder()
_problem = find_problem(PACKAGE_FOLDER)
if _problem is not None:
    raise ImportError(_problem)
