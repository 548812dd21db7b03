"""LoRA adapters: read from PEFT's folders, placed beside a model's projections.

folder.py   adapter_config.json, and the tensors by module
beside.py   the model's own tensors, tokenizer and chat template beside them
changes.py  a model's modules, their factors, and an adapter's share of each projection
placing.py  an adapter's modules matched with a model's
"""

from vlm_serve.models.adapters.changes import (
    LowRank,
    Modules,
    changes_of,
    to_send,
    uniform,
    without_effect,
)
from vlm_serve.models.adapters.folder import AdapterFile, read_adapter
from vlm_serve.models.adapters.placing import Adapter, place

__all__ = [
    "Adapter",
    "AdapterFile",
    "LowRank",
    "Modules",
    "changes_of",
    "place",
    "read_adapter",
    "to_send",
    "uniform",
    "without_effect",
]
