"""Models: architectures, weights, and the forward over packed tokens, paged KV and state rows."""

from vlm_serve.models.files import resolve_checkpoint
from vlm_serve.models.model import Model, load_model
from vlm_serve.models.registry import read_spec
from vlm_serve.models.spec import ModelSpec

__all__ = ["Model", "ModelSpec", "load_model", "read_spec", "resolve_checkpoint"]
