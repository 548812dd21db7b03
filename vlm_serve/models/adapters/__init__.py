"""LoRA adapters: read from PEFT's folders, placed beside a model's projections.

fields.py        adapter_config.json: ranks, scales, refusals
folder.py        the tensors, by module
low_rank.py      one module's change
experts.py       all experts' changes in one tensor
base_weights.py  the model's own tensors among them
beside.py        a tokenizer or chat template beside them
tokens.py        what decides the ids of a tokenizer

placing.py       a model's modules, an adapter's share of each projection
sharing.py       modules and changes in the same memory
"""

from vlm_serve.models.adapters.folder import AdapterFile, read_adapter
from vlm_serve.models.adapters.low_rank import LowRank
from vlm_serve.models.adapters.placing import (
    Adapter,
    Modules,
    changes_of,
    place,
    uniform,
    without_effect,
)
from vlm_serve.models.adapters.sharing import to_send

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
