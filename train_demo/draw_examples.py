"""Make the pictures and the video that the examples ask about:
`python train_demo/draw_examples.py examples/media`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import av
from demo_clips import Clip, frame_count, render_clip
from demo_drawing import render
from demo_scenes import RGB, Background, Scene, Thing
from PIL import Image
from skimage.data import chelsea


def plain(colour: RGB) -> Background:
    return Background(colour, colour, True, 0.0, 0)


def write_video(path: Path, frames: Sequence[Image.Image], frame_rate: int) -> None:
    """Write frames as an H.264 file."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=frame_rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_image(frame)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", metavar="FOLDER", type=Path, help="where to write the files")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    pale, grey, white = plain((214, 222, 230)), plain((120, 120, 120)), plain((255, 255, 255))
    shapes = (
        Thing("star", "red", 0.27, 0.27, 0.19, True),
        Thing("circle", "blue", 0.72, 0.72, 0.13, False),
        Thing("triangle", "green", 0.73, 0.27, 0.19, True),
    )
    render(Scene(shapes, pale), 240, 240).save(out / "shapes.png")
    star = Thing("star", "red", 0.5, 0.5, 0.3, True)
    render(Scene((star,), white), 160, 160).save(out / "star.png")
    heart = Thing("heart", "yellow", 0.5, 0.5, 0.3, True)
    render(Scene((heart,), grey), 120, 160).save(out / "heart.png")
    before = Thing("circle", "red", 0.5, 0.5, 0.28, True)
    after = Thing("circle", "blue", 0.5, 0.5, 0.28, True)
    clip = Clip("change", 6, 10, pale, (before, after), (4,))
    frames = render_clip(clip, list(range(frame_count(clip))), 128, 128)
    write_video(out / "change.mp4", frames, clip.frame_rate)
    # CC0, by Stefan van der Walt; it comes with scikit-image.
    Image.fromarray(chelsea()).save(out / "photo.jpg", quality=88)


if __name__ == "__main__":
    main()
