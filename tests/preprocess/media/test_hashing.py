"""Content hashes: equal exactly where the model sees the same medium."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from decoded import decode_image
from PIL import ExifTags, Image

from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.media.part_options import ImageOptions
from vlm_serve.preprocess.media.processing import content_hash, process_image
from vlm_serve.preprocess.media.processors import PixelConfig

CONFIG = PixelConfig(
    patch_size=8,
    temporal_patch_size=2,
    merge_size=2,
    min_pixels=1024,
    max_pixels=4096,
    do_resize=True,
    resample=3,
    do_rescale=True,
    rescale_factor=1 / 255,
    do_normalize=True,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)


def pixels(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def test_every_field_counts() -> None:
    image = pixels(3, 16, 32)
    frames = pixels(2, 3, 16, 32)
    seen = {
        content_hash("image", image, (1, 2, 4)),
        content_hash("video", image, (1, 2, 4)),
        content_hash("image", image, (1, 4, 2)),
        content_hash("image", image.reshape(3, 32, 16), (1, 2, 4)),
        content_hash("image", image.flip(2).contiguous(), (1, 2, 4)),
        content_hash("video", frames, (1, 2, 4)),
        content_hash("video", frames.flip(0).contiguous(), (1, 2, 4)),
    }
    assert len(seen) == 7
    assert all(len(digest) == 32 for digest in seen)
    assert content_hash("image", image.clone(), (1, 2, 4)) in seen


def test_the_definition_does_not_drift() -> None:
    """Stored caches are read by these hashes: a change makes all of them unreadable."""
    image = torch.arange(48, dtype=torch.uint8).reshape(3, 4, 4)

    def field(name: str, value: bytes) -> bytes:
        head = len(name).to_bytes(4, "little") + name.encode()
        return head + len(value).to_bytes(8, "little") + value

    data = (
        field("domain", b"vlm-serve content 1")
        + field("modality", b"image")
        + field("dtype", b"uint8")
        + field("shape", b"3,4,4")
        + field("grid", b"1,2,2")
        + bytes(range(48))
    )
    assert content_hash("image", image, (1, 2, 2)) == blake3(data).digest()


def digest(data: bytes) -> bytes:
    decoded = decode_image(data, MediaLimits())
    return process_image(decoded, ImageOptions(1024, 4096), CONFIG).record.hashes[0]


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 4, (40, 56, 3), dtype=np.uint8) * 64
    return Image.fromarray(noise)


def test_one_picture_in_several_files_is_one_medium(picture: Image.Image) -> None:
    files = [
        encode(picture, "PNG"),
        encode(picture, "PNG", compress_level=0),
        encode(picture, "WEBP", lossless=True),
        encode(picture, "BMP"),
        encode(picture.quantize(256), "PNG"),
        encode(picture.convert("RGBA"), "PNG"),
    ]
    assert len(set(files)) == len(files)
    assert len({digest(data) for data in files}) == 1


def test_one_pixel_array_under_another_reading_is_another_medium(picture: Image.Image) -> None:
    palette = picture.quantize(64)
    recoloured = palette.copy()
    recoloured.putpalette(bytes(reversed(palette.getpalette() or [])))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    files = [
        encode(palette, "PNG"),
        encode(recoloured, "PNG"),
        encode(palette, "PNG", transparency=5),
        encode(picture, "PNG", exif=exif),
        encode(picture.convert("L"), "PNG"),
        encode(picture.resize((112, 80)), "PNG"),
        encode(picture.crop((0, 0, 55, 40)), "PNG"),
    ]
    assert len({digest(data) for data in files}) == len(files)
