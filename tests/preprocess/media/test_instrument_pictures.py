"""Grey TIFF files of instruments, and pictures of formats that are not read."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from decoded import decode_image
from PIL import Image

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media import images
from vlm_serve.preprocess.media.images import file_kind, image_to_rgb
from vlm_serve.preprocess.media.limits import MediaLimits

LIMITS = MediaLimits()
GREY = np.kron(np.random.default_rng(0).integers(0, 256, (4, 6)), np.ones((8, 8), int))
Samples = npt.NDArray[Any]


def tiff(samples: Samples, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(samples).save(buffer, "TIFF", **options)
    return buffer.getvalue()


def check(data: bytes, expected: Samples, most: int = 1) -> None:
    pixels = decode_image(data, LIMITS)
    assert pixels.shape == (*expected.shape, 3)
    assert np.abs(pixels.astype(int) - np.asarray(expected)[:, :, None]).max() <= most


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
@pytest.mark.parametrize("options", [{}, {"compression": "tiff_lzw"}])
def test_whole_numbers_are_shown_by_the_bits_that_they_use(
    bits: int, options: dict[str, Any]
) -> None:
    samples = (GREY * (2**bits - 1) / 255).round().astype(np.uint16)
    check(tiff(samples, **options), GREY)
    check(tiff(samples.astype(np.int32), **options), GREY)


@pytest.mark.parametrize("white", [1.0, 255.0])
def test_floating_numbers_up_to_a_white_are_shares_of_it(white: float) -> None:
    check(tiff((GREY / 255 * white).astype(np.float32)), GREY)


@pytest.mark.parametrize(
    ("low", "high"), [(-40.0, 37.5), (273.15, 310.0), (-1e30, 1e30), (0.0, 1e-3 + 1e6)]
)
def test_other_numbers_go_from_the_smallest_to_the_largest(low: float, high: float) -> None:
    stretched = (GREY - GREY.min()) * 255 / (GREY.max() - GREY.min())
    samples = low + (high - low) * stretched / 255
    check(tiff(samples.astype(np.float32)), stretched.round())
    if abs(low) < 1e9 and high - low > 1000:
        check(tiff(samples.astype(np.int32)), stretched.round())
    check(tiff((stretched * 1e6 - 5).astype(np.int32)), stretched.round())


def test_numbers_that_are_none_are_black_or_white() -> None:
    samples = (GREY / 255).astype(np.float32)
    samples[0, :3] = np.nan, np.inf, -np.inf
    expected = GREY.copy()
    expected[0, :3] = 0, 255, 0
    check(tiff(samples), expected)
    for value in (np.nan, np.inf, 7.5, -3.0):
        flat = decode_image(tiff(np.full((8, 8), value, np.float32)), LIMITS)
        assert len(np.unique(flat)) == 1


def test_the_range_is_that_of_the_whole_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_STRIP_PIXELS", GREY.shape[1] * 3)
    samples = GREY * 10.0 + 5000
    stretched = (GREY - GREY.min()) * 255 / (GREY.max() - GREY.min())
    check(tiff(samples.astype(np.float32)), stretched.round())


def test_a_callers_floats_are_shown_alike_and_png_keeps_its_upper_byte() -> None:
    picture = Image.fromarray((GREY / 255).astype(np.float32))
    assert np.abs(image_to_rgb(picture, LIMITS)[:, :, 0].astype(int) - GREY).max() <= 1
    buffer = io.BytesIO()
    Image.fromarray((GREY * 16).astype(np.uint16)).save(buffer, "PNG")
    check(buffer.getvalue(), GREY * 16 >> 8, 0)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("JPEG2000", "a JPEG 2000 picture"),
        ("PPM", "a PPM picture"),
        ("TGA", "a TGA picture"),
        ("ICO", "a Windows icon (ICO)"),
    ],
)
def test_other_formats_are_named_with_what_helps(form: str, kind: str) -> None:
    buffer = io.BytesIO()
    Image.fromarray(GREY.astype(np.uint8)).convert("RGB").resize((32, 32)).save(buffer, form)
    assert file_kind(buffer.getvalue()) == kind
    with pytest.raises(MediaError, match="save it as PNG") as caught:
        decode_image(buffer.getvalue(), LIMITS)
    assert f": it is {kind}; save it as PNG" in caught.value.message


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"P5 4 4 255\n" + bytes(16), "a PPM picture; save it as PNG"),
        (b"P3\n1 1\n255\n0 0 0\n", "a PPM picture; save it as PNG"),
        (b"\xff\x4f\xff\x51" + bytes(40), "a JPEG 2000 picture; save it as PNG"),
        (b"8BPS" + bytes(40), "(PSD); save it as PNG"),
        (b"v/1\x01" + bytes(40), "OpenEXR picture; save it as PNG"),
        (b"SIMPLE  =                    T", "FITS picture; save it as PNG"),
        (bytes(128) + b"DICM" + bytes(40), "a DICOM picture; export it as PNG"),
    ],
)
def test_so_are_those_that_no_library_here_reads(head: bytes, words: str) -> None:
    with pytest.raises(MediaError) as caught:
        decode_image(head, LIMITS)
    assert words in caught.value.message


def written(samples: Samples, form: int) -> bytes:
    """A TIFF file of samples of any kind; `form` is the tag SampleFormat."""
    height, width, *more = samples.shape
    count, bits, body = (more or [1])[0], samples.dtype.itemsize * 8, samples.tobytes()
    tags = 8 + 2 + 10 * 12 + 4
    lists = struct.pack(f"<{count}H", *[bits] * count) + struct.pack(f"<{count}H", *[form] * count)
    one = count == 1
    entries = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, count, bits if one else tags)]
    entries += [(259, 3, 1, 1), (262, 3, 1, 1 if one else 2), (273, 4, 1, tags + len(lists))]
    entries += [(277, 3, 1, count), (278, 3, 1, height), (279, 4, 1, len(body))]
    entries += [(339, 3, count, form if one else tags + 2 * count)]
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, 10) + packed + bytes(4) + lists + body


def test_kinds_of_samples_are_read_or_refused_by_name() -> None:
    check(written((GREY * 236 - 30000).astype("<i2"), 2), stretch(GREY))
    check(written((GREY * 8e6 - 1e9).astype("<i4"), 2), stretch(GREY))
    check(written((GREY * 8e6).astype("<u4"), 1), stretch(GREY))
    check(written((GREY * 257).astype("<u2"), 1), GREY)
    with pytest.raises(MediaError, match="whole numbers over 2147483647; save it as PNG"):
        decode_image(written((GREY * 16e6).astype("<u4"), 1), LIMITS)
    colours = np.stack([GREY / 255] * 3, axis=2).astype("<f4")
    for data in (written(colours, 3), written((GREY / 255).astype("<f8"), 3)):
        with pytest.raises(MediaError, match="a TIFF picture; save its samples with 8 or 16 bits"):
            decode_image(data, LIMITS)


def stretch(grey: Samples) -> Samples:
    stretched: Samples = ((grey - grey.min()) * 255 / (grey.max() - grey.min())).round()
    return stretched
