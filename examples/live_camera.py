"""Watch a recording that grows: `python examples/live_camera.py [VIDEO]`.

A camera's frames form one growing video. With a fixed sampling grid (`fps_grid`), a longer
recording keeps every frame, size and timestamp of a shorter one. So the model computes only the
frames since the last question; the beginning of the video comes from the cache.

A file replaces the camera in this example. A real camera passes frames in the same way: as arrays,
or as the growing file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from vlm_serve import Output, Pipeline, SamplingParams

CAMERA = Path(__file__).parent / "media" / "change.mp4"
QUESTION = "What happens?"
# Two frames form one temporal patch; questions wait for whole patches.
SAMPLE_FPS = 1.0
SECONDS_BETWEEN_QUESTIONS = 2.0
# The demo model has learned from frames of this size. Others need no such limit.
FRAME_PIXELS = 64 * 64

Recording = npt.NDArray[np.uint8]


def recordings(path: Path) -> Iterator[tuple[float, Recording]]:
    """Yield (frames per second, all frames so far) whenever a question is due."""
    with av.open(str(path)) as camera:
        rate = float(camera.streams.video[0].average_rate or 24)
        step = round(rate * SECONDS_BETWEEN_QUESTIONS)
        frames: list[Recording] = []
        for frame in camera.decode(video=0):
            frames.append(frame.to_ndarray(format="rgb24"))
            if len(frames) % step == 0:
                yield rate, np.stack(frames)


def watch(pipe: Pipeline, path: Path, question: str = QUESTION) -> Iterator[tuple[float, Output]]:
    """Yield (seconds of video, answer) for every recording, each longer than the one before."""
    greedy = SamplingParams(temperature=0.0, max_tokens=96)
    for rate, frames in recordings(path):
        video: dict[str, Any] = {
            "type": "video",
            "video": frames,
            "fps": rate,
            "sampling": "fps_grid",
            "sample_fps": SAMPLE_FPS,
            "max_frame_pixels": FRAME_PIXELS,
        }
        content = [video, {"type": "text", "text": question}]
        yield len(frames) / rate, pipe.chat([{"role": "user", "content": content}], greedy)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("video", nargs="?", type=Path, default=CAMERA, help="in place of a camera")
    video = parser.parse_args().video
    with Pipeline("demo") as pipe:
        for seconds, output in watch(pipe, video):
            usage = output.usage
            print(f"after {seconds:.0f} s: {output.text}")
            print(
                f"  ({usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from the cache: "
                f"{output.cache_report.reason})"
            )


if __name__ == "__main__":
    main()
