"""Images of every kind: what their pixels become, and what is refused."""

from __future__ import annotations

import io
import struct
import threading
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import oracle
import pytest
from decoded import decode_image
from PIL import ExifTags, Image, ImageOps

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media import images as media_image
from vlm_serve.preprocess.media.images import FORMATS, image_to_rgb
from vlm_serve.preprocess.media.limits import MediaLimits

LIMITS = MediaLimits()
Image.init()
WRITTEN = [form for form in FORMATS if form in Image.SAVE]
"""HEIF has no writer here; tests/preprocess/media/test_picture_files.py reads one."""


def picture(height: int = 20, width: int = 30, channels: int = 3) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def transformers_rgb(image: Image.Image) -> Any:
    oracle.prepare_torchvision()
    from transformers.image_transforms import convert_to_rgb

    return convert_to_rgb(image, return_numpy=True)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True}), ("GIF", {})],
)
def test_lossless_formats_give_the_pixels(kind: str, options: dict[str, Any]) -> None:
    pixels = picture() // 64 * 64  # few enough colours for a GIF's palette
    data = encode(Image.fromarray(pixels), kind, **options)
    assert np.array_equal(decode_image(data, LIMITS), pixels)


@pytest.mark.parametrize("kind", WRITTEN)
def test_every_named_format_is_read(kind: str) -> None:
    data = encode(Image.new("RGB", (40, 30), (200, 30, 90)), kind)
    pixels = decode_image(data, LIMITS)
    assert pixels.shape == (30, 40, 3)
    assert np.abs(pixels.astype(int) - (200, 30, 90)).max() <= 4


def test_photograph_equals_pillow(photographs: Path) -> None:
    for name in ("rocket.jpg", "coffee.png", "page.png"):
        with Image.open(photographs / name) as image:
            expected = np.array(image.convert("RGB"))
        assert np.array_equal(decode_image((photographs / name).read_bytes(), LIMITS), expected)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV"])
def test_opaque_modes_equal_transformers(mode: str) -> None:
    image = Image.fromarray(picture()).convert(mode)
    assert np.array_equal(image_to_rgb(image, LIMITS), transformers_rgb(image))


def transparent_images() -> dict[str, Image.Image]:
    rgba = Image.fromarray(picture(channels=4), "RGBA")
    palette = Image.fromarray(picture()).quantize(16)
    palette_bytes, palette_index = palette.copy(), palette.copy()
    palette_bytes.info["transparency"] = bytes(range(0, 256, 16))
    palette_index.info["transparency"] = 3
    grey, colour = Image.fromarray(picture()).convert("L"), Image.fromarray(picture() // 128 * 128)
    grey.info["transparency"] = int(np.asarray(grey)[0, 0])
    colour.info["transparency"] = (128, 0, 128)
    return {
        "RGBA": rgba,
        "LA": rgba.convert("LA"),
        "PA": rgba.convert("PA"),
        "P with bytes": palette_bytes,
        "P with index": palette_index,
        "L with a grey": grey,
        "RGB with a colour": colour,
    }


@pytest.mark.parametrize("name", transparent_images())
def test_transparency_is_white_as_in_transformers(name: str) -> None:
    image = transparent_images()[name]
    pixels = image_to_rgb(image, LIMITS)
    assert np.array_equal(pixels, transformers_rgb(image))
    assert not np.array_equal(pixels, np.array(image.convert("RGBA").convert("RGB")))
    # The same through a file.
    if name != "PA":
        options = {"transparency": image.info["transparency"]} if " " in name else {}
        assert np.array_equal(decode_image(encode(image, "PNG", **options), LIMITS), pixels)


def test_fully_transparent_is_white() -> None:
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert (image_to_rgb(image, LIMITS) == 255).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_16_bit_grey_keeps_its_upper_byte(dtype: Any) -> None:
    samples = np.arange(0, 65536, 97)[: 24 * 28].reshape(24, 28)
    image = Image.fromarray(samples.astype(dtype))
    expected = np.repeat((samples >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    assert np.array_equal(image_to_rgb(image, LIMITS), expected)
    if dtype is np.uint16:
        assert np.array_equal(decode_image(encode(image, "PNG"), LIMITS), expected)


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, extra: bytes = b"") -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + extra + body


def test_16_bit_colour_png() -> None:
    samples = np.random.default_rng(1).integers(0, 65536, (5, 7, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in samples)
    assert np.array_equal(decode_image(png(7, 5, 16, 2, rows), LIMITS), samples >> 8)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_transparent_greys_of_few_bits(depth: int) -> None:
    """The transparent sample is named at the file's depth: 3 of 4 bits is the grey 51."""
    count, per_byte = 1 << depth, 8 // depth
    packed = np.zeros(-(-count // per_byte), dtype=np.uint8)
    for sample in range(count):
        packed[sample // per_byte] |= sample << (8 - depth * (sample % per_byte + 1))
    for clear in range(count):
        chunk = png_chunk(b"tRNS", struct.pack(">H", clear))
        data = png(count, 1, depth, 0, b"\0" + packed.tobytes(), chunk)
        expected = [
            255 if sample == clear else sample * 255 // (count - 1) for sample in range(count)
        ]
        assert decode_image(data, LIMITS)[0, :, 0].tolist() == expected


def test_16_bit_colour_png_with_a_transparent_colour() -> None:
    """All 16 bits count: a colour that shares the upper bytes stays."""
    samples = np.array([[[300, 40_000, 5], [301, 40_000, 5], [300, 40_000, 5]]], dtype=">u2")
    chunk = png_chunk(b"tRNS", struct.pack(">HHH", 300, 40_000, 5))
    pixels = decode_image(png(3, 1, 16, 2, b"\0" + samples.tobytes(), chunk), LIMITS)
    assert pixels.tolist() == [[[255] * 3, [1, 156, 0], [255] * 3]]


def whole(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Conversion of a picture in one piece, as it was before there were strips."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        samples = np.asarray(image).astype(np.int64)
        grey = (np.clip(samples, 0, 0xFFFF) >> 8).astype(np.uint8)
        if isinstance(image.info.get("transparency"), int):
            grey[samples == image.info["transparency"]] = 0xFF
        return np.repeat(grey[:, :, None], 3, axis=2)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return np.array(image.convert("RGB"))
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return np.array(Image.alpha_composite(white, image).convert("RGB"))


def test_strips_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_image, "_STRIP_PIXELS", 100)
    images = list(transparent_images().values())
    for mode in ("1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "LAB"):
        images.append(
            Image.fromarray(picture(23, 31)).convert(mode)
            if mode != "LAB"
            else Image.frombytes("LAB", (31, 23), picture(23, 31).tobytes())
        )
    samples = np.random.default_rng(2).integers(0, 70_000, (23, 31))
    images += [Image.fromarray(samples.astype(kind)) for kind in (np.uint16, np.int32)]
    for image in images:
        for orientation in range(1, 9):
            image.getexif()[ExifTags.Base.Orientation] = orientation
            assert np.array_equal(image_to_rgb(image, LIMITS), whole(image)), image.mode


def test_16_bit_grey_png_with_a_transparent_grey() -> None:
    samples = np.array([[0, 300, 40_000]], dtype=">u2")
    data = png(3, 1, 16, 0, b"\0" + samples.tobytes(), png_chunk(b"tRNS", struct.pack(">H", 300)))
    assert decode_image(data, LIMITS)[0, :, 0].tolist() == [0, 255, 40_000 >> 8]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    quarters = np.zeros((32, 48, 3), dtype=np.uint8)
    quarters[:16, 24:], quarters[16:, :24], quarters[16:, 24:] = 85, 170, 255
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    pixels = decode_image(encode(Image.fromarray(quarters), kind, exif=exif, **options), LIMITS)
    flipped = quarters[:, ::-1] if orientation in (2, 4, 5, 7) else quarters
    # After the mirror: counter-clockwise quarter turns that bring the picture upright.
    turns = {1: 0, 2: 0, 3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}[orientation]
    expected = np.rot90(flipped, turns)
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).max() <= 8


def test_broken_exif_does_not_lose_the_picture() -> None:
    pixels = picture()
    data = encode(Image.fromarray(pixels), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert np.array_equal(decode_image(data, LIMITS), pixels)


def test_first_frame_of_an_animation() -> None:
    first, second = Image.new("RGB", (9, 9), (255, 0, 0)), Image.new("RGB", (9, 9), (0, 0, 255))
    data = encode(first, "WEBP", save_all=True, append_images=[second], lossless=True)
    assert (decode_image(data, LIMITS) == (255, 0, 0)).all()


def test_the_callers_image_stays_as_it_is(photographs: Path) -> None:
    """Also when several threads use one lazily opened image at once."""
    expected = decode_image((photographs / "coffee.png").read_bytes(), LIMITS)
    with Image.open(photographs / "coffee.png") as image:
        image.getexif()[ExifTags.Base.Orientation] = 1
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda: found.append(image_to_rgb(image, LIMITS)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert image.mode == "RGB"
    assert len(found) == 8
    assert all(np.array_equal(pixels, expected) for pixels in found)


def broken_files() -> dict[str, bytes]:
    whole = encode(Image.fromarray(picture(200, 200)), "PNG")
    jpeg = encode(Image.fromarray(picture(200, 200)), "JPEG")
    return {
        "empty": b"",
        "noise": bytes(range(256)) * 10,
        "text": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "png cut": whole[: len(whole) // 2],
        "png header": whole[:40],
        "png signature": whole[:8],
        "jpeg cut": jpeg[: len(jpeg) // 2],
        "jpeg header": jpeg[:100],
        "png flipped": whole[:200] + bytes([whole[200] ^ 255]) + whole[201:],
        "gif header": b"GIF89a\x01\x00\x01\x00",
        "webp header": b"RIFF\x10\x00\x00\x00WEBPVP8 ",
        "tiff header": b"II*\x00\xff\xff\xff\x7f",
        "ppm": b"P6 2 2 255 " + bytes(12),
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "no rows": png(0, 5, 8, 2, b""),
    }


@pytest.mark.parametrize("name", broken_files())
def test_broken_and_unsupported_files_are_media_errors(name: str) -> None:
    with pytest.raises(MediaError) as caught:
        decode_image(broken_files()[name], LIMITS)
    assert caught.value.status == 400


@pytest.mark.parametrize("size", [(13_000, 13_000), (60_000, 60_000), (8193, 8192)])
def test_pixel_bombs_are_refused_by_their_header(size: tuple[int, int]) -> None:
    data = png(*size, 8, 2, b"\0")  # would fail as truncated, were it decoded
    with pytest.raises(MediaError, match=f"over {LIMITS.max_image_pixels} pixels"):
        decode_image(data, LIMITS)


def test_limits_are_those_that_are_set() -> None:
    data = encode(Image.fromarray(picture()), "PNG")
    assert decode_image(data, replace(LIMITS, max_image_pixels=600)).shape == (20, 30, 3)
    with pytest.raises(MediaError, match="pixels"):
        decode_image(data, replace(LIMITS, max_image_pixels=599))
    with pytest.raises(MediaError, match="bytes"):
        decode_image(data, replace(LIMITS, max_image_bytes=len(data) - 1))
    with pytest.raises(MediaError, match="pixels"):
        image_to_rgb(Image.new("L", (30, 20)), replace(LIMITS, max_image_pixels=599))


@pytest.mark.parametrize("kind", WRITTEN)
def test_flipped_bytes_give_pixels_or_media_errors(kind: str) -> None:
    whole = encode(Image.fromarray(picture(30, 40)), kind)
    random = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(whole)
        for at in random.integers(0, len(data), random.integers(1, 20)):
            data[at] = random.integers(0, 256)
        try:
            assert decode_image(bytes(data), LIMITS).shape[2] == 3
        except MediaError as error:
            assert error.message
