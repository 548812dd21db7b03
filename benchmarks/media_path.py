"""Measure what a repeated upload costs, what samplings decode, and how fast pixels are hashed.

    python benchmarks/media_path.py [--before FOLDER]

Encodes a 30-second 1080p clip, prepares a question about it, then other questions about the same
bytes. Then other samplings of the clip are prepared, with all embeddings at hand: how many of its
frames each one shows, knows and decodes. Last, compares the content hash of a frame with what
blake3 alone does on it.

`--before` prepares the first and the repeated question in two children instead: one imports
another checkout, one this. They take turns; the ratios are of neighbouring pairs.
"""

from __future__ import annotations

import argparse
import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import av
import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import numpy as np
import torch
from blake3 import blake3
from common.kernels_before import Before, is_child, serve
from common.machine import ROOT, commit
from make_checkpoint import make_checkpoint

from vlm_serve.preprocess.media.processing import content_hash
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


def question(preprocessor: Preprocessor, video: bytes, text: str) -> None:
    content = [{"type": "video", "video": video}, {"type": "text", "text": text}]
    preprocessor.prepare([{"role": "user", "content": content}])


def begin(checkpoint: Path) -> Preprocessor:
    return Preprocessor(checkpoint, block_size=64, root_key=lambda salt: bytes(32))


def cases(checkpoint: Path) -> Iterator[dict[str, Callable[[], object]]]:
    """Yield what a child times: the first question about a clip, then further ones."""
    video = clip()
    kept = begin(checkpoint)
    question(kept, video, "What happens?")
    numbers = itertools.count()

    def first() -> None:
        preprocessor = begin(checkpoint)
        question(preprocessor, video, "What happens?")
        preprocessor.close()

    yield {
        "first": first,
        "again": lambda: question(kept, video, f"What happens after {next(numbers)} seconds?"),
    }


def compare(folder: Path, rounds: int) -> None:
    """Print medians and quartiles of the time before over the time now."""
    before = Before(folder, ROOT)
    try:
        for name in before.next():
            before.run(name)
            pairs = [before.run(name) for _ in range(rounds if name == "first" else 10 * rounds)]
            quarters = statistics.quantiles([then / now for then, now in pairs], n=4)
            now = statistics.median(now for _, now in pairs)
            print(
                f"{name}: {1e3 * now:.1f} ms, before / now {quarters[1]:.2f} "
                f"(quartiles {quarters[0]:.2f} and {quarters[2]:.2f} of {len(pairs)} pairs)"
            )
    finally:
        before.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="checkout of a commit to compare with")
    parser.add_argument("--rounds", type=int, default=9, help="pairs with --before (default 9)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(folder)
        if is_child():
            serve(cases(checkpoint))
        elif given.before is not None:
            print(f"before: commit {commit(given.before)}")
            compare(given.before.resolve(), given.rounds)
        else:
            report(checkpoint)


def report(checkpoint: Path) -> None:
    video = clip()
    preprocessor = begin(checkpoint)
    first = seconds(lambda: question(preprocessor, video, "What happens?"))
    texts = [f"What happens after {second} seconds?" for second in range(9)]
    again = statistics.median(
        [seconds(partial(question, preprocessor, video, each)) for each in texts]
    )
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
