"""Count what identical patches spare: slides, a screen recording and a camera.

    python benchmarks/media_repeats.py [--seconds 60]

Makes recordings of 1280x720 and samples each at 2 frames a second, as a live camera's. Spans of
equal content are encoded once (`media_repeated` in reports). Then the same file is sampled at
1 frame a second, with the embeddings of the first sampling at hand: its frames are known, and their
pixels are needed for new spans alone. Only counts are shown; they depend on the encoder, not on the
machine's speed.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import numpy as np
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from PIL import Image, ImageDraw, ImageFont

from vlm_serve.engine.requests.reports import repeated_spans
from vlm_serve.preprocess.identity.keys import embedding_key
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.prepare import Preprocessor

RATE, WIDTH, HEIGHT = 10, 1280, 720
SPEC = CheckpointSpec(patch_size=16, video_max_pixels=25_165_824)
"""Patches and the budget of a video as Qwen3-VL's."""
TEXT = "The quick brown fox jumps over the lazy dog, and over its own shadow. "
SLIDE_SECONDS, SCROLL_SECONDS, LINES = 10, 15, 24


def slide(number: int) -> Image.Image:
    """A title, some points and a chart."""
    picture = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((80, 60), f"Chapter {number}", "black", ImageFont.load_default(64))
    for point in range(4):
        words = TEXT[7 * (number + point) % 40 :][:40]
        draw.text((80, 190 + 70 * point), f"- {words}", "black", ImageFont.load_default(34))
    for bar in range(6):
        top = 650 - (37 * (number + 1) * (bar + 2)) % 180
        draw.rectangle((760 + 70 * bar, top, 810 + 70 * bar, 660), fill=(40, 90, 60 + 30 * bar))
    return picture


def slides(seconds: int) -> Iterator[Any]:
    """A slide for ten seconds each."""
    for index in range(seconds * RATE):
        yield np.asarray(slide(index // (SLIDE_SECONDS * RATE)))


def screen(seconds: int) -> Iterator[Any]:
    """An editor: somebody types for five seconds of fifteen; a cursor blinks; then it scrolls."""
    font = ImageFont.load_default(22)
    for index in range(seconds * RATE):
        page, at = divmod(index, SCROLL_SECONDS * RATE)
        picture = Image.new("RGB", (WIDTH, HEIGHT), (30, 30, 36))
        draw = ImageDraw.Draw(picture)
        for line in range(LINES):
            shift = 5 * (line + 7 * page) % 30
            draw.text((40, 20 + 28 * line), TEXT[shift:], (220, 220, 210), font)
        typed = TEXT[: min(at, 5 * RATE)]
        draw.rectangle((0, 690, WIDTH, HEIGHT), fill=(30, 30, 36))
        draw.text((40, 690), typed, (250, 250, 120), font)
        if index // (RATE // 2) % 2:
            end = 44 + draw.textlength(typed, font)
            draw.rectangle((end, 692, end + 10, 714), fill=(250, 250, 250))
        yield np.asarray(picture)


def camera(seconds: int) -> Iterator[Any]:
    """A slide on a wall, with a sensor's noise."""
    random = np.random.default_rng(0)
    still = np.asarray(slide(0)).astype(np.int16)
    for _ in range(seconds * RATE):
        noise = random.integers(-4, 5, still.shape, dtype=np.int16)
        yield np.clip(still + noise, 0, 255).astype(np.uint8)


def record(pictures: Iterator[Any], codec: str, options: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream(codec, rate=RATE, options=options)
        stream.width, stream.height = WIDTH, HEIGHT
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


LOSSY = {"preset": "veryfast", "crf": "23"}
KINDS: dict[str, tuple[Callable[[int], Iterator[Any]], str, dict[str, str]]] = {
    "slides, H.264": (slides, "libx264", LOSSY),
    "slides, H.264, a key frame every 2 s": (slides, "libx264", LOSSY | {"g": str(2 * RATE)}),
    "slides, lossless": (slides, "ffv1", {}),
    "screen recording, H.264": (screen, "libx264", LOSSY),
    "screen recording, lossless": (screen, "ffv1", {}),
    "camera, H.264": (camera, "libx264", LOSSY),
}


def keys_of(prompt: Prompt) -> set[bytes]:
    root = prompt.keys.vision_root
    return {embedding_key(root, span.content_hash, span.merge_size) for span in prompt.spans}


def sampled(preprocessor: Preprocessor, video: bytes, fps: float) -> Prompt:
    part = {"type": "video", "video": video, "sampling": "fps_grid", "sample_fps": fps}
    return preprocessor.prepare([{"role": "user", "content": [part]}])


def row(checkpoint: Path, name: str, video: bytes) -> str:
    preprocessor = Preprocessor(checkpoint, block_size=64, root_key=lambda salt: bytes(32))
    encoded: set[bytes] = set()
    preprocessor.know_embeddings(encoded.__contains__)
    first = sampled(preprocessor, video, 2.0)
    encoded |= keys_of(first)
    counts = preprocessor.raw_index.frames.counts
    before = dict(counts)
    second = sampled(preprocessor, video, 1.0)
    known, decoded, shown = (counts[each] - before[each] for each in ("known", "decoded", "shown"))
    new = len(keys_of(second) - encoded)
    preprocessor.close()
    spans, repeated = len(first.spans), repeated_spans(first)
    cells = [
        name,
        f"{spans}",
        f"{spans - repeated}",
        f"{100 * repeated / spans:.0f} %",
        f"{before['decoded']}",
        f"{new} of {len(second.spans)}",
        f"{known} of {shown}",
        f"{decoded}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60)
    seconds = parser.parse_args().seconds
    print(f"{seconds} s of {RATE} frames a second, {WIDTH}x{HEIGHT}")
    print("| recording | spans | encoded | spared | frames decoded | then new spans |", end="")
    print(" frames known | frames decoded |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(folder, SPEC)
        for name, (pictures, codec, options) in KINDS.items():
            print(row(checkpoint, name, record(pictures(seconds), codec, options)), flush=True)


if __name__ == "__main__":
    main()
