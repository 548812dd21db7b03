"""Measure what a repeated upload costs, what samplings decode, and how fast pixels are hashed.

    python benchmarks/media_path.py

Encodes a 30-second 1080p clip, prepares a question about it, then other questions about the same
bytes. Then other samplings of the clip are prepared, with all embeddings at hand: how many of its
frames each one shows, knows and decodes. Last, compares the content hash of a frame with what
blake3 alone does on it.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import av
import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import numpy as np
import torch
from blake3 import blake3
from make_checkpoint import make_checkpoint

from vlm_serve.preprocess.hashing import content_hash
from vlm_serve.preprocess.prepare import Preprocessor

SECONDS, RATE, WIDTH, HEIGHT = 30, 24, 1920, 1080


def clip() -> bytes:
    """An MP4 of moving gradients with some noise."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 24, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    across = np.linspace(0, 200, WIDTH, dtype=np.uint8)[None, :, None]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for index in range(SECONDS * RATE):
            pixels = np.roll(across, 5 * index, axis=1) + noise
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


SAMPLINGS = (
    ("uniform", {"num_frames": 4}),
    ("fps_grid", {"sample_fps": 1}),
    ("fps_grid", {"sample_fps": 0.1}),
)


def samplings(preprocessor: Preprocessor, video: bytes) -> None:
    """Print counts of frames; they do not depend on the machine."""
    preprocessor.know_embeddings(lambda key: True)
    counts = preprocessor.raw_index.frames.counts
    for sampling, options in SAMPLINGS:
        before = counts.copy()
        part = {"type": "video", "video": video, "sampling": sampling, **options}
        preprocessor.prepare([{"role": "user", "content": [part]}])
        shown, known, decoded = (
            counts[each] - before[each] for each in ("shown", "known", "decoded")
        )
        print(
            f"{options}: {shown} frames shown, {known} known, {decoded} of {SECONDS * RATE} decoded"
        )


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    video = clip()
    with tempfile.TemporaryDirectory() as folder:
        preprocessor = Preprocessor(
            make_checkpoint(folder), block_size=64, root_key=lambda salt: bytes(32)
        )

        def ask(question: str) -> object:
            content = [{"type": "video", "video": video}, {"type": "text", "text": question}]
            return preprocessor.prepare([{"role": "user", "content": content}])

        first = seconds(lambda: ask("What happens?"))
        questions = [f"What happens after {second} seconds?" for second in range(9)]
        again = statistics.median([seconds(partial(ask, question)) for question in questions])
        print(f"1080p, {SECONDS} s, {len(video) / 2**20:.1f} MiB: first {1e3 * first:.0f} ms,")
        print(f"again {1e3 * again:.1f} ms: {100 * again / first:.2f} % of the first")
        samplings(preprocessor, video)
        preprocessor.close()

    pixels = torch.randint(0, 256, (3, 1088, 1920), dtype=torch.uint8)
    raw = pixels.numpy().tobytes()
    alone, ours = [], []
    for _ in range(41):
        alone.append(seconds(lambda: blake3(raw).digest()))
        ours.append(seconds(lambda: content_hash("video", pixels, (1, 68, 120))))
    share = 100 * min(alone) / min(ours)  # the best of each: the rest is other people's load
    print(f"content hash of a frame: {share:.0f} % of the speed of blake3 alone")


if __name__ == "__main__":
    main()
