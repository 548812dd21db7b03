"""An engine in the tests' process, and one in a process of its own."""

from __future__ import annotations

import pytest

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.remote.engine import RemoteEngine

FORMS = (
    pytest.param(Engine.from_checkpoint, id="here"),
    pytest.param(RemoteEngine, marks=pytest.mark.processes, id="apart"),
)
"""Parameters of a fixture, each of which starts an engine."""
