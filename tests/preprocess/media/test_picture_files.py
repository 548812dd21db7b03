"""Pictures and lists of pictures of clients: faults, animations, frames."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from decoded import decode_image
from PIL import Image

from vlm_serve.errors import InvalidRequestError, MediaError
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media.images import AnimatedPicture, file_kind, may_be_animated, plugins
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.prepare import Preprocessor

LIMITS = MediaLimits()
# Red and green above blue and white, 64 x 48; by pillow-heif 1.4.0.
HEIC = """
AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAX1tZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAAAAAA
AAAAACJpbG9jAAAAAERAAAEAAQAAAAABoQABAAAAAAAAANUAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABodmMxAAAA
AA5waXRtAAAAAAABAAAA/WlwcnAAAADdaXBjbwAAAHZodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEAGEABDAH//wNw
AAADAJAAAAMAAAMAHroCQGEAAQAqQgEBA3AAAAMAkAAAAwAAAwAeoCCBBZbq5Ka5uAhoMCAAAAMDIAAAAwAhYgABAAZEAcFz
wIkAAAATY29scm5jbHgAAQANAAaAAAAAFGlzcGUAAAAAAAAAQAAAAEAAAAAoY2xhcAAAAEAAAAABAAAAMAAAAAEAAAAAAAAA
Av////AAAAACAAAAEHBpeGkAAAAAAwgICAAAABhpcG1hAAAAAAAAAAEAAQWBAgMFhAAAAN1tZGF0AAAA0SgBrwngIzUt/+7Z
//79byHsJ6R07u/Uo/9iY7vgNv/6r219+jvTf/aqO/jib/pmCaqBJTdf/yWsvMjFbj0AM6LrrvQJ6DIaz9O7f00pG7VEniHh
pAgsdIWPqWkd4U2QMoaHl4yIHBUNGyZkvGGthsSdJG1JnP9zPycUoYm0AzAuZvKOpauyig1ROXM0SVYzRKZEDr2nz1p2e+aU
avV9arfEhuuKFsmI4zSrEIyL4HxXFXTY/P6gFn8/DP92a9a8SXX1r23xww4FnytGjT+4bJu4
"""


def photograph(height: int = 96, width: int = 128) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    waves = [127 + 120 * np.sin(x / (7 + c) + y / (11 - c) + c) for c in range(3)]
    return Image.fromarray(np.stack(waves, axis=2).astype(np.uint8))


def saved(picture: Image.Image, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# Small faults


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 30}])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_jpeg_without_its_end_is_read(options: dict[str, Any], cut: int) -> None:
    whole = saved(photograph(), "JPEG", **options)
    assert np.array_equal(decode_image(whole[:-cut], LIMITS), decode_image(whole, LIMITS))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_without_its_last_blocks_is_not(share: float, progressive: bool) -> None:
    whole = saved(photograph(), "JPEG", progressive=progressive)
    with pytest.raises(MediaError, match="truncated"):
        decode_image(whole[: int(len(whole) * share)], LIMITS)


def chunk(kind: bytes, body: bytes, *, sound: bool = True) -> bytes:
    checksum = zlib.crc32(kind + body) ^ (not sound)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


@pytest.mark.parametrize("at", [33, -12])
def test_a_png_with_a_broken_note_is_read(at: int) -> None:
    """Behind the header, and before the end."""
    whole = saved(photograph(), "PNG")
    broken = whole[:at] + chunk(b"tEXt", b"Comment\0none", sound=False) + whole[at:]
    assert np.array_equal(decode_image(broken, LIMITS), decode_image(whole, LIMITS))


@pytest.mark.parametrize("kind", [b"tRNS", b"IDAT"])
def test_a_png_with_broken_pixels_is_not(kind: bytes) -> None:
    whole = saved(photograph(), "PNG")
    body = b"\0\1\0\1\0\1" if kind == b"tRNS" else b"\0"
    with pytest.raises(MediaError):
        decode_image(whole[:33] + chunk(kind, body, sound=False) + whole[33:], LIMITS)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
        (b"\n<html><title>404</title>", "an HTML page"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "an MP4 or MOV video; send it as a video$"),
        (b"\x1aE\xdf\xa3" + bytes(40), "a Matroska or WebM video; send it as a video$"),
        (b"%PDF-1.7", "a PDF document; a part of the type file takes it$"),
        (b"\xff\x0a" + bytes(40), "a JPEG XL picture"),
        (b"\xef\xbb\xbf[1, 2]", "a JSON text"),
        (b"Access denied", "a text"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, kind: str) -> None:
    if kind == "a JPEG XL picture" and "JXL" in plugins():
        pytest.skip("JPEG XL is read here")
    with pytest.raises(MediaError, match=f"supported format .*WEBP.*: it is {kind}"):
        decode_image(data, LIMITS)


def test_noise_has_no_name() -> None:
    assert file_kind(b"\x80\x81\x82" * 40) is None and file_kind(b"") is None


def test_heic_is_read_where_its_package_is() -> None:
    if "HEIF" not in plugins():
        with pytest.raises(MediaError, match="a HEIC picture; install pi-heif"):
            decode_image(base64.b64decode(HEIC), LIMITS)
        return
    picture = decode_image(base64.b64decode(HEIC), LIMITS)
    assert picture.shape == (48, 64, 3)
    corners = [picture[y, x].astype(int) for y in (10, 38) for x in (10, 54)]
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
    assert all(np.abs(corners[at] - colours[at]).max() < 60 for at in range(4))


# Animations


def pictures(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (64, 48), (10 * n, 250 - 10 * n, 40)) for n in range(count)]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animated_picture_is_a_video(form: str) -> None:
    first, *others = pictures(20)
    options = {"lossless": True} if form == "WEBP" else {}
    data = saved(first, form, save_all=True, append_images=others, duration=100, **options)
    assert may_be_animated(data)
    video = AnimatedPicture(data, None, LIMITS)
    assert len(video.times) == 20 and video.fps == pytest.approx(10) and video.steady
    shown = [frame[20, 20].astype(int) for frame in video.frames([0, 7, 7, 19])]
    for index, colour in zip((0, 7, 7, 19), shown, strict=True):
        assert np.abs(colour - (10 * index, 250 - 10 * index, 40)).max() <= 6


def test_durations_of_frames_are_their_times() -> None:
    first, *others = pictures(4)
    durations = [100, 500, 0, 200]  # browsers show none as 100 ms
    data = saved(first, "GIF", save_all=True, append_images=others, duration=durations)
    video = AnimatedPicture(data, None, LIMITS)
    assert video.times == pytest.approx([0, 0.1, 0.6, 0.7]) and not video.steady
    assert AnimatedPicture(data, 2.0, LIMITS).times == [0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_a_still_picture_is_no_video(form: str) -> None:
    with pytest.raises(MediaError, match=f"a still {form} picture; send it as an image"):
        AnimatedPicture(saved(photograph(), form), None, LIMITS)


def test_broken_animations_are_media_errors() -> None:
    first, *others = pictures(12)
    data = saved(first, "GIF", save_all=True, append_images=others, duration=50)
    random = np.random.default_rng(0)
    for _ in range(60):
        broken = bytearray(data[: random.integers(20, len(data))])
        broken[random.integers(0, len(broken))] ^= 255
        try:
            video = AnimatedPicture(bytes(broken), None, LIMITS)
            list(video.frames([0, len(video.times) - 1]))
        except MediaError:
            continue


# Videos as lists of frames


def ask(preprocessor: Preprocessor, part: dict[str, Any]) -> Prompt:
    return preprocessor.prepare([{"role": "user", "content": [part]}])


def frames(count: int) -> list[Image.Image]:
    return [photograph().rotate(9 * n) for n in range(count)]


def test_frames_of_every_form_are_one_medium(preprocessor: Preprocessor) -> None:
    urls = [data_url(saved(frame, "PNG")) for frame in frames(6)]
    listed = "data:video/png;base64," + ",".join(url.partition(",")[2] for url in urls)
    arrays = np.stack([np.asarray(frame) for frame in frames(6)])
    parts: list[dict[str, Any]] = [
        {"type": "video", "video": urls, "fps": 2},
        {"type": "video_url", "video_url": {"url": urls}, "fps": 2},
        {"type": "video_url", "video_url": {"url": listed}},
        {"type": "video", "video": arrays, "fps": 2, "num_frames": -1},
    ]
    prompts = [ask(preprocessor, part) for part in parts]
    assert len({tuple(prompt.token_ids) for prompt in prompts}) == 1
    assert len({tuple(span.content_hash for span in prompt.spans) for prompt in prompts}) == 1
    assert len(prompts[0].spans) == 3, "all frames are taken, two a patch"


def test_a_known_list_is_not_decoded_again(preprocessor: Preprocessor) -> None:
    urls = [data_url(saved(frame, "PNG")) for frame in frames(5)]
    first = ask(preprocessor, {"type": "video", "video": urls})
    again = ask(preprocessor, {"type": "video", "video": urls})
    assert (first.media[0].decoded, again.media[0].decoded) == (True, False)
    other = ask(preprocessor, {"type": "video", "video": [*urls[:4], urls[0]]})
    assert other.media[0].decoded


def test_lists_may_be_sampled(preprocessor: Preprocessor) -> None:
    urls = [data_url(saved(frame, "PNG")) for frame in frames(8)]
    part = {"type": "video", "video": urls, "fps": 4, "sample_fps": 2}
    assert len(ask(preprocessor, part).spans) == 2


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        ([data_url(b"<html>")], "it is an HTML page"),
        (
            [data_url(saved(Image.new("RGB", (64, 64 + 8 * n)), "PNG")) for n in range(2)],
            "one size",
        ),
        (["ftp://example.com/a.png"], "URL"),
        ([], "frames or a list of images"),
    ],
)
def test_bad_lists_name_the_frame(preprocessor: Preprocessor, urls: list[str], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        ask(preprocessor, {"type": "video", "video": urls})
    assert caught.value.param is not None and ".video" in caught.value.param


def test_original_detail_is_high(preprocessor: Preprocessor) -> None:
    url = data_url(saved(photograph(), "PNG"))
    made = [
        ask(preprocessor, {"type": "image_url", "image_url": {"url": url, "detail": detail}})
        for detail in ("high", "original")
    ]
    assert made[0].spans[0].content_hash == made[1].spans[0].content_hash
