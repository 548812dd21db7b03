"""LoRA adapters: read from PEFT's folders, placed beside a model's projections.

fields.py        adapter_config.json: ranks, scales, refusals
folder.py        the tensors, by module
experts.py       all experts' changes in one tensor
base_weights.py  the model's own tensors among them
beside.py        a tokenizer or chat template beside them
tokens.py        what decides the ids of a tokenizer

modules.py       a model's modules, and their rows in its projections
changes.py       modules' factors, and an adapter's share of each projection
placing.py       an adapter's modules matched with a model's
"""

from vlm_serve.models.adapters.changes import LowRank, changes_of, to_send, uniform, without_effect
from vlm_serve.models.adapters.folder import AdapterFile, read_adapter
from vlm_serve.models.adapters.modules import Modules
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
