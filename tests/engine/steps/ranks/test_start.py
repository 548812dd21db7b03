"""Where the ranks of a model find each other when they start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from other_user import mode, umask

import vlm_serve
from vlm_serve.engine.steps.ranks.start import _rendezvous
from vlm_serve.models import read_spec
from vlm_serve.options.config import EngineConfig

DEMO = Path(vlm_serve.__file__).parent / "demo" / "dense"


@pytest.mark.parametrize("compiled", [True, False])
def test_nobody_else_can_come(compiled: bool) -> None:
    """The store of a process group would be written by whoever has opened it, and read by all."""
    source: Any = SimpleNamespace(compiled=compiled, spec=read_spec(DEMO))
    with umask(0), _rendezvous(source, EngineConfig(tensor_parallel_size=2)) as rendezvous:
        if compiled:
            assert mode(rendezvous.file) == 0o600
        else:
            assert mode(rendezvous.file.parent) == 0o700 and not rendezvous.file.exists()
            rendezvous.file.touch()
    assert not rendezvous.file.exists()
    assert compiled or not rendezvous.file.parent.exists()
