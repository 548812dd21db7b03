"""What a command says while nothing else can be seen of it for seconds."""

from __future__ import annotations

import contextlib
import logging
import sys

LONG_PARTS = (
    "vlm_serve.engine.start.kernel_check",
    "vlm_serve.engine.steps.step_paths",
    "vlm_serve.engine.start.warm_up",
    "vlm_serve.kernels.native_build",
    "vlm_serve.models.files",
    "vlm_serve.models.weights",
)
"""Modules with a message before whatever may take seconds of a start."""


def say_what_takes_long(*, logs: bool) -> None:
    """Say on standard error why nothing happens for seconds, unless the libraries are loaded.

    To a file or a pipe a server says nothing of its libraries: services are silent.

    Args:
        logs: the command shows its log. Otherwise messages of the modules that may take long are
            shown: fetching and reading weights, compiling kernels.
    """
    if "torch" in sys.modules:
        return
    with contextlib.suppress(OSError, ValueError):
        if logs and not sys.stderr.isatty():
            return
        print("vlm-serve: loading its libraries, some seconds", file=sys.stderr, flush=True)
    if not logs:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("vlm-serve: %(message)s"))
        for name in LONG_PARTS:
            logging.getLogger(name).addHandler(handler)
            logging.getLogger(name).setLevel(logging.INFO)
