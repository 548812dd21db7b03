"""Runs one of Ray's agents, which the kernel kills when its raylet ends.

By itself an agent notices that end only after a minute, and not at all while it is stopped.
"""

from __future__ import annotations

import os
import runpy
import sys

from vlm_serve.system.child import command, end_with

RAYLET = "RAY_RAYLET_PID"
"""Environment variable with the process id of the raylet, set by Ray for its agents."""


def bound_command() -> list[str]:
    """Return the words to put before an agent's script and its arguments."""
    return command(__name__)


if __name__ == "__main__":
    end_with(int(os.environ[RAYLET]))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
