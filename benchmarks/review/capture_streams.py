"""Why engines name the stream that they capture: torch's own is one a process, over a stand-in.

    python benchmarks/review/capture_streams.py

Without `stream=`, `torch.cuda.graph` takes one stream a process: of the first capture's device.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from unittest.mock import patch

import checkout  # noqa: F401
import torch

from vlm_serve.engine.steps.step_tables import CudaGraphs


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args(arguments)
    current = ["cuda:0"]
    graph = torch.cuda.graph
    with (
        patch.object(torch.cuda, "Stream", lambda *_, **__: SimpleNamespace(device=current[0])),
        patch.object(torch.cuda, "stream", lambda stream: stream),
        patch.object(graph, "default_capture_stream", None),
    ):
        first = graph(object())  # type: ignore[arg-type]
        current[0] = "cuda:1"
        second = graph(object())  # type: ignore[arg-type]
    shared = second.capture_stream is first.capture_stream
    print(f"by default cuda:1 captures on a stream of {second.capture_stream.device}")
    print(f"which is {'' if shared else 'not '}the stream of the first engine")
    print(inspect.getsource(CudaGraphs.capture))


if __name__ == "__main__":
    main()
