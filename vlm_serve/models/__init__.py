"""Models: configs, weights, and the forward over packed tokens, paged KV and state rows."""

from vlm_serve.models.config import ModelConfig
from vlm_serve.models.files import resolve_checkpoint
from vlm_serve.models.qwen3_5 import Model, load_model

__all__ = ["Model", "ModelConfig", "load_model", "resolve_checkpoint"]
