"""Models whose steps run by Triton kernels, in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from vlm_serve.models import Model, load_model
from vlm_serve.models.parts import feed_forward


@contextmanager
def kernel_model(checkpoint: Path, *, drafts: bool = False) -> Iterator[Model]:
    """Load a float32 model on the CPU as a GPU would: Triton kernels do not read the experts'
    packed weights of the CPU path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_forward, "stacked_experts", lambda device: True)
        yield load_model(checkpoint, torch.float32, "cpu", drafts=drafts)
