"""Converts encoded images and PIL images to upright 8-bit RGB, and animated ones to videos.

Transparency is composed over white with the same Pillow calls as in transformers
(`image_transforms.convert_to_rgb`), hence with the same bits. Three things left open by
transformers are defined here. EXIF orientation is always applied. 16-bit samples keep their upper
byte instead of clipping. A transparent colour of a PNG file refers to samples at the file's own
depth. Grey TIFF files of instruments are shown by the range of their samples (`_grey_range`).

Pictures are converted strip by strip into the returned array. Besides it and Pillow's decoded
image, no other full-size copy exists.

Files with small faults are read as other programs read them. Each scan of a progressive JPEG file
may touch every pixel, however few bytes the scan has. So scans are counted from the markers,
without decoding anything.

Optional packages read further formats. HEIC and HEIF need `pi-heif` (the extra `media`) or
`pillow-heif`; JPEG XL needs `pillow-jxl-plugin`.

Pages of PDF documents are rendered with pdfium. A page counts as a picture: a
file of its own, its number with the document's bytes behind it. So it has a key like any upload,
and a known page is not rendered again. Only decoding processes open documents.

`file_kind` names the kind of a file by its first bytes, for errors.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.ExifTags
import PIL.Image
from PIL.PngImagePlugin import PngImageFile

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.limits import MediaLimits, check_deadline, check_video
from vlm_serve.preprocess.media.video_times import FrameTimes, measure

Pixels = npt.NDArray[np.uint8]
NewPixels = Callable[[tuple[int, int, int]], Pixels]
"""Allocates the output array of a given shape."""

_PLUGINS: tuple[tuple[str, str, str], ...] = (
    ("pi_heif", "pi-heif", "HEIF"),
    ("pillow_heif", "pillow-heif", "HEIF"),
    ("pillow_jxl", "pillow-jxl-plugin", "JXL"),
)
"""(module, package, format as Pillow names it); of two for a format the first one is taken."""


@cache
def plugins() -> dict[str, str]:
    """Register the installed plugins with Pillow; return their versions by format."""
    versions: dict[str, str] = {}
    for module, package, form in _PLUGINS:
        if form in versions:
            continue
        try:
            number = version(package)
            loaded = import_module(module)
        except (PackageNotFoundError, ImportError, OSError):
            continue
        if form == "HEIF":
            loaded.register_heif_opener()
        if form in PIL.Image.OPEN:
            versions[form] = f"{package} {number}"
    return versions


FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP", *plugins())
_WHITE = (255, 255, 255, 255)
_16_BIT = frozenset({"I", "I;16", "I;16B", "I;16L", "I;16N"})
_STRIP_PIXELS = 1 << 20
# Bytes that Pillow uses per pixel; 4 in all other modes.
_MODE_BYTES = {"1": 1, "L": 1, "P": 1} | dict.fromkeys(_16_BIT - {"I"}, 2)
# Two threads must not load a lazily opened image at the same time.
_load_lock = threading.Lock()
_DAMAGED = "the image is truncated or damaged"
MP4 = "an MP4 or MOV video"
PDF = "a PDF document"
_VIDEO_KINDS = (
    *(MP4, "an AVI video", "a Matroska or WebM video", "an FLV video", "an ASF or WMV file"),
    "an MPEG program stream",
)
_REMEDIES = dict.fromkeys(_VIDEO_KINDS, "send it as a video") | {
    "a TIFF picture": "save its samples with 8 or 16 bits, or as PNG",
    PDF: "a part of the type file takes it",
    "a HEIC picture": "install pi-heif to read it",
    "a HEIF picture": "install pi-heif to read it",
    "a JPEG XL picture": "install pillow-jxl-plugin to read it",
}
"""What helps, by kind of file (`file_kind`)."""
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHUNK = struct.Struct(">I4s")
_CHECKSUM = struct.Struct(">I")
_MATTERS = frozenset({b"tRNS", b"acTL", b"fcTL", b"fdAT"})
"""Ancillary chunks with an effect on pixels."""
_JPEG_START, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
_SEARCHED = 1 << 16
"""Bytes at a JPEG file's end to search for its end marker."""
# Inside a scan, 0xFF is followed by 0 (a sample), a restart marker or fill bytes.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_BARE = frozenset({0x01, 0xD8})
_START_OF_SCAN, _END = 0xDA, 0xD9
_PADS = (bytes(64), b"\x2a\xd5" * 32)


_ANIMATED = ("GIF", "WEBP", "PNG", "AVIF")
_ANIMATED_KINDS = frozenset({"a GIF picture", "a WebP picture", "a PNG picture", "an AVIF picture"})
_SHORTEST_MS, _DEFAULT_MS = 11, 100
"""Browsers show a frame with a shorter duration for as long as the default."""
_MILLISECOND = Fraction(1, 1000)


class MediaMemoryError(MediaError):
    """Decoding exceeds its memory limit."""


def _empty(shape: tuple[int, int, int]) -> Pixels:
    return np.empty(shape, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """An encoded image with only its header read.

    Attributes:
        image: the image as Pillow opened it.
        low: the same file, opened to give the lower bytes of 16-bit colours; None if not needed.
        twin: a JPEG file without its end marker, ended in another way; None for all others.
        work: pixels times the passes of the decoder over them.
    """

    image: PIL.Image.Image
    low: PIL.Image.Image | None
    work: int
    twin: PIL.Image.Image | None = None


def open_image(data: bytes, limits: MediaLimits) -> OpenedImage:
    """Read and check the header of an encoded image.

    Args:
        data: the file's bytes; formats are those in `FORMATS`, and pages (`PdfPage.packed`).
        limits: limits on bytes, pixels, passes and memory; all are checked before decoding.

    Raises MediaError unless it is such an image, within the limits.
    """
    if not data:
        raise MediaError("the image is empty")
    if len(data) > limits.max_image_bytes:
        raise MediaError(f"the image is over {limits.max_image_bytes} bytes")
    if is_page(data):
        image = render_page(data, limits)
        return OpenedImage(image, None, image.width * image.height)
    try:
        data, twin = _without_broken_notes(data), None
        if _lacks_end(data):
            data, other = _ended_twice(data)
            twin = PIL.Image.open(io.BytesIO(other), formats=FORMATS)
        image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except PIL.UnidentifiedImageError:
        raise _unsupported(data) from None
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
        raise _too_many_pixels(limits) from None
    except MemoryError:
        raise _too_much_memory(limits) from None
    except Exception:  # Pillow's plugins raise errors of any kind on a broken header
        raise MediaError("the image is damaged") from None
    _check_size(image, limits)
    scans = count_scans(data, limits.max_image_scans)
    if scans > limits.max_image_scans:
        raise MediaError(f"the image has over {limits.max_image_scans} scans")
    low = _normalise_transparency(image, data)
    pixels = image.width * image.height
    held = _MODE_BYTES.get(image.mode, 4) * (2 if low or twin else 1) + 3
    if scans > 1:  # the decoder keeps all coefficients between scans
        held += 2 * len(image.getbands())
    if pixels * held > limits.max_decode_bytes:
        raise _too_much_memory(limits)
    return OpenedImage(image, low, pixels * max(scans, 1), twin)


def decode_opened(opened: OpenedImage, limits: MediaLimits, new: NewPixels = _empty) -> Pixels:
    """Decode an opened image (the first frame of an animated one) into an array from `new`, and
    close the image.

    Returns:
        uint8 `[height, width, 3]`.

    Raises MediaError if it is not complete.
    """
    with opened.image as image:
        if opened.twin is not None:
            _check_complete(image, opened.twin, limits)
        return _decode(image, opened.low, limits, new)


def image_to_rgb(image: PIL.Image.Image, limits: MediaLimits) -> Pixels:
    """Convert a PIL image of any mode, which stays unchanged.

    Returns:
        uint8 `[height, width, 3]`.

    Raises MediaError if it is over the pixel limit, of an unsupported mode, or cannot be loaded.
    """
    _check_size(image, limits)
    with _load_lock:
        _load(image, limits)
    return _decode(image, None, limits, _empty)


def _check_size(image: PIL.Image.Image, limits: MediaLimits) -> None:
    if image.width * image.height > limits.max_image_pixels:
        raise _too_many_pixels(limits)
    if image.width == 0 or image.height == 0:
        raise MediaError("the image has no pixels")


@contextlib.contextmanager
def _reading(limits: MediaLimits) -> Iterator[None]:
    """Turn the block's errors into MediaError: Pillow's plugins raise any kind on broken data."""
    try:
        yield
    except MemoryError:
        raise _too_much_memory(limits) from None
    except Exception:
        raise MediaError(_DAMAGED) from None


def _load(image: PIL.Image.Image, limits: MediaLimits) -> None:
    with _reading(limits):
        image.load()


def _check_complete(image: PIL.Image.Image, twin: PIL.Image.Image, limits: MediaLimits) -> None:
    """Raise MediaError if a JPEG file without its end marker lacks blocks, too."""
    for picture in (image, twin):
        _load(picture, limits)
    with twin:
        if not np.array_equal(np.asarray(image), np.asarray(twin)):
            raise MediaError(_DAMAGED)


def _unsupported(data: bytes) -> MediaError:
    kind = file_kind(data)
    known = f"not an image of a supported format ({', '.join(FORMATS)})"
    guess = f": it is {kind}" if kind else ""
    remedy = _REMEDIES.get(kind or "") or (
        "save it as PNG" if kind in {*_OTHERS.values(), _TGA} else ""
    )
    return MediaError(known + guess + (remedy and f"; {remedy}"))


def _decode(
    image: PIL.Image.Image,
    low: PIL.Image.Image | None,
    limits: MediaLimits,
    new: NewPixels,
) -> Pixels:
    _load(image, limits)
    if low is not None:
        _load(low, limits)
    grey = _grey_range(image)
    with _reading(limits):
        orientation = _orientation(image)
        transposed = orientation in _TRANSPOSED
        pixels = new(
            (image.width, image.height, 3) if transposed else (image.height, image.width, 3)
        )
        view = _AS_STORED.get(orientation, _unchanged)(pixels)
        for box in _strips(image.size):
            view[box[1] : box[3]] = _to_rgb(image.crop(box), low and low.crop(box), grey)
    return pixels


def _strips(size: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    width, height = size
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        yield 0, top, width, min(top + rows, height)


def _too_many_pixels(limits: MediaLimits) -> MediaError:
    return MediaError(f"the image is over {limits.max_image_pixels} pixels")


def _too_much_memory(limits: MediaLimits) -> MediaMemoryError:
    most = limits.max_decode_bytes >> 20
    return MediaMemoryError(f"the image takes over {most} MiB to decode")


def _unchanged(pixels: Any) -> Any:
    return pixels


# Map an upright picture to its stored layout, by EXIF orientation.
_AS_STORED: dict[int, Callable[[Any], Any]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels, 3),
}
_TRANSPOSED = frozenset({5, 6, 7, 8})


def _orientation(image: PIL.Image.Image) -> int:
    try:
        orientation = image.getexif().get(PIL.ExifTags.Base.Orientation, 1)
    except Exception:  # broken EXIF does not make the pixels invalid
        return 1
    return orientation if isinstance(orientation, int) else 1


def _normalise_transparency(image: PIL.Image.Image, data: bytes) -> PIL.Image.Image | None:
    """Scale a PNG file's transparent colour to the depth of Pillow's samples.

    Pillow drops the lower bytes of 16-bit colours: for those, return an image that reads them.
    """
    if not isinstance(image, PngImageFile) or image.info.get("transparency") is None:
        return None
    raw_mode = image.tile[0].args if image.tile else None
    if raw_mode in ("L;2", "L;4"):
        largest = (1 << int(raw_mode[2:])) - 1
        image.info["transparency"] = (image.info["transparency"] & largest) * (255 // largest)
    if raw_mode != "RGB;16B":
        return None
    low = PngImageFile(io.BytesIO(data))
    low.tile = [tile._replace(args="RGB;16L") for tile in low.tile]
    return low


def _grey_range(image: PIL.Image.Image) -> tuple[float, float] | None:
    """Return the samples that are black and white; None: the upper byte of 16 bits is shown.

    White is the first of the numbers below that is not exceeded. Samples beyond all, or below 0,
    are shown from the smallest to the largest. Raises MediaError for some that Pillow misreads.
    """
    if image.mode != "F" and not (image.format == "TIFF" and image.mode in _16_BIT):
        return None
    low, high = np.inf, -np.inf
    for box in _strips(image.size):
        samples = np.asarray(image.crop(box)).astype(np.float64)
        known = samples[np.isfinite(samples)]
        low, high = known.min(initial=low), known.max(initial=high)
    if low < 0 and image.mode == "I" and dict(getattr(image, "tag_v2", {})).get(339, (1,))[0] == 1:
        raise MediaError("a TIFF picture with whole numbers over 2147483647; save it as PNG")
    whites = (1, 0xFF) if image.mode == "F" else (0xFF, 0x3FF, 0xFFF, 0x3FFF, 0xFFFF)
    white = next((white for white in whites if low >= 0 and high <= white), None)
    if white == 0xFFFF:
        return None
    return (float(low), float(high)) if white is None else (0.0, float(white))


def _from_range(samples: Any, black: float, white: float) -> Pixels:
    scale = 255 / (white - black) if white > black else 0.0
    shown = np.nan_to_num(samples.astype(np.float64), posinf=white, neginf=black)
    grey = np.rint(np.clip((shown - black) * scale, 0, 255)).astype(np.uint8)
    return np.broadcast_to(grey[:, :, None], (*grey.shape, 3))


def _to_rgb(
    strip: PIL.Image.Image, low: PIL.Image.Image | None, grey: tuple[float, float] | None
) -> Pixels:
    if grey is not None:
        return _from_range(np.asarray(strip), *grey)
    if strip.mode in _16_BIT:
        return _from_16_bit(strip)
    if low is not None:
        key = np.array(strip.info["transparency"])
        pixels = np.array(strip)
        clear = (pixels == key >> 8).all(axis=2) & (np.asarray(low) == key & 0xFF).all(axis=2)
        pixels[clear] = 0xFF
        return pixels
    return np.asarray(_over_white(strip))


def _over_white(image: PIL.Image.Image) -> PIL.Image.Image:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    image = image.convert("RGBA")
    background = PIL.Image.new("RGBA", image.size, _WHITE)
    return PIL.Image.alpha_composite(background, image).convert("RGB")


def _from_16_bit(image: PIL.Image.Image) -> Pixels:
    samples = np.asarray(image)
    grey = (np.clip(samples, 0, 0xFFFF) >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[samples == transparent] = 0xFF
    return np.broadcast_to(grey[:, :, None], (*grey.shape, 3))


def count_scans(data: bytes, most: int) -> int:
    """Count the scans of the first image, at most `most + 1`; 0 if it is not a JPEG file."""
    if data[:2] != b"\xff\xd8":
        return 0
    scans, at = 0, 2
    while scans <= most:
        marker = _MARKER.search(data, at)
        if marker is None or data[marker.start() + 1] == _END:
            break
        kind, at = data[marker.start() + 1], marker.end()
        if kind in _BARE:
            continue
        scans += kind == _START_OF_SCAN
        at += max(2, int.from_bytes(data[at : at + 2], "big"))
    return scans


def _without_broken_notes(data: bytes) -> bytes:
    """Return a PNG file without descriptive chunks of a wrong checksum.

    Other bytes come back as they are.
    """
    if not data.startswith(_PNG_SIGNATURE):
        return data
    view = memoryview(data)
    kept, at, dropped = [view[: len(_PNG_SIGNATURE)]], len(_PNG_SIGNATURE), False
    while at + _CHUNK.size <= len(data):
        size, kind = _CHUNK.unpack_from(data, at)
        body = at + _CHUNK.size
        end = body + size + _CHECKSUM.size
        if end > len(data):
            break
        note = bool(kind[0] & 0x20) and kind not in _MATTERS
        if (
            note
            and zlib.crc32(view[at + 4 : body + size])
            != _CHECKSUM.unpack_from(data, body + size)[0]
        ):
            dropped = True
        else:
            kept.append(view[at:end])
        at = end
    return b"".join([*kept, view[at:]]) if dropped else data


def _lacks_end(data: bytes) -> bool:
    """Return True for a JPEG file without a marker at its end."""
    return data.startswith(_JPEG_START) and data.rfind(_JPEG_END, max(0, len(data) - _SEARCHED)) < 0


def _ended_twice(data: bytes) -> tuple[bytes, bytes]:
    """Return a JPEG file with two different ends.

    Bytes behind the last block do not change a picture. So both give the same pixels, unless blocks
    are missing.
    """
    blocks = data.rstrip(_JPEG_END[:1])  # half of the marker may be there
    first, second = (blocks + pad + _JPEG_END for pad in _PADS)
    return first, second


def may_be_animated(data: bytes | memoryview) -> bool:
    """Return True for a possibly animated picture: GIF, WebP, PNG or AVIF."""
    return file_kind(data) in _ANIMATED_KINDS


class AnimatedPicture:
    """An animated picture in memory; a `Video`.

    Args:
        data: the file.
        fps: replaces the file's durations.
        limits: limits on bytes, frames, pixels, length and decoding time.

    Raises MediaError for a still or damaged picture, and beyond a limit.
    """

    cut_short, sound = False, True
    num_decoded = 0

    def __init__(self, data: bytes | memoryview, fps: float | None, limits: MediaLimits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.max_decode_seconds
        with _damage_told():
            self._image = PIL.Image.open(io.BytesIO(bytes(data)), formats=_ANIMATED)
            size = self._image.height, self._image.width
            total = int(getattr(self._image, "n_frames", 1))
            check_video(total, None, size, limits)
            if total < 2:
                kind = self._image.format
                raise MediaError(f"a still {kind} picture; send it as an image")
            timeline = self._find_times(total, fps)
        self.times, self.fps, self.steady = timeline.seconds, timeline.fps, timeline.steady
        check_video(total, self.times[-1] + 1 / self.fps, size, limits)

    def _find_times(self, total: int, fps: float | None) -> FrameTimes:
        if fps is not None:
            return FrameTimes.even(total, fps)
        shown, at = [], 0
        for index in range(total):
            self._seek(index)
            shown.append(at)
            duration = round(float(self._image.info.get("duration") or 0))
            at += duration if duration >= _SHORTEST_MS else _DEFAULT_MS
        return measure(shown, total, _MILLISECOND, 0.0)

    def _seek(self, index: int) -> None:
        check_deadline(self._deadline, self._limits)
        self._image.seek(index)
        self._image.load()

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """See `Video.frames`. Raises MediaError if the file proves to be damaged."""
        self._deadline = time.monotonic() + self._limits.max_decode_seconds
        for index in indices:
            with _damage_told():
                self._seek(index)
                pixels = image_to_rgb(self._image, self._limits)
            self.num_decoded = index + 1  # a picture is made from those before it
            yield pixels


@contextlib.contextmanager
def _damage_told() -> Iterator[None]:
    """Turn the block's other errors into MediaError: Pillow's plugins raise any kind on broken
    data."""
    try:
        yield
    except MediaError:
        raise
    except Exception:
        raise MediaError("the animated picture is damaged") from None


_SEEN = 1024
"""Bytes of the beginning to look at."""
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, _LFS_POINTER, "a pointer of Git LFS; fetch the file itself"),
    (0, b"%PDF-", PDF),
    (0, b"PK\x03\x04", "a ZIP archive, or a document in one"),
    (0, b"\x1f\x8b", "compressed with gzip"),
    (0, b"Rar!", "a RAR archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"\xff\x0a", "a JPEG XL picture"),
    (0, b"\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL picture"),
    (0, b"\xff\xd8\xff", "a JPEG picture"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (0, b"GIF8", "a GIF picture"),
    (0, b"BM", "a BMP picture"),
    (0, b"II*\0", "a TIFF picture"),
    (0, b"MM\0*", "a TIFF picture"),
    (128, b"DICM", "a DICOM picture; export it as PNG"),
    (8, b"WEBP", "a WebP picture"),
    (8, b"WAVE", "a WAV sound"),
    (8, b"AVI ", "an AVI video"),
    (0, b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (0, b"FLV\x01", "an FLV video"),
    (0, b"0&\xb2u\x8ef\xcf\x11", "an ASF or WMV file"),
    (0, b"\0\0\x01\xba", "an MPEG program stream"),
    (0, b"OggS", "an Ogg file"),
    (0, b"ID3", "an MP3 sound"),
    (0, b"fLaC", "a FLAC sound"),
    (0, b"#EXTM3U", "a playlist, which names files elsewhere"),
    (0, b"\x7fELF", "a program"),
    (0, b"SQLite format 3\0", "an SQLite database"),
)
_OTHERS = {
    b"\0\0\0\x0cjP  \r\n\x87\n": "a JPEG 2000 picture",
    b"\xff\x4f\xff\x51": "a JPEG 2000 picture",
    b"\0\0\x01\0": "a Windows icon (ICO)",
    b"8BPS": "a Photoshop document (PSD)",
    b"v/1\x01": "an OpenEXR picture",
    b"SIMPLE  =": "a FITS picture",
    **{b"P%d%c" % (kind, end): "a PPM picture" for kind in range(1, 8) for end in b"\n\r \t"},
}
"""Pictures of other formats by their first bytes."""
_TGA, _TGA_END = "a TGA picture", b"TRUEVISION-XFILE.\0"
_BRANDS = {
    b"avif": "an AVIF picture",
    b"avis": "an AVIF picture",
    b"heic": "a HEIC picture",
    b"heix": "a HEIC picture",
    b"heim": "a HEIC picture",
    b"hevc": "a HEIC picture",
    b"mif1": "a HEIF picture",
    b"msf1": "a HEIF picture",
}
_LOGIN = re.compile(rb"(?i)\b(log ?in|sign ?in|password)\b")


def file_kind(data: bytes | memoryview) -> str | None:
    """Return the kind of a file, as it reads behind "it is"; None for unknown bytes."""
    head = bytes(data[:_SEEN])
    for at, magic, kind in _MAGIC:
        if head[at : at + len(magic)] == magic:
            return kind
    if other := next((magic for magic in _OTHERS if head.startswith(magic)), None):
        return _OTHERS[other]
    if bytes(data[-len(_TGA_END) :]) == _TGA_END:
        return _TGA
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], MP4)
    return _text_kind(head)


def _text_kind(head: bytes) -> str | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    lower = text[:_SEEN].lower()
    if lower.startswith((b"<!doctype html", b"<html")):
        page = "an HTML page"
        return f"{page}, perhaps to log in" if _LOGIN.search(text) else page
    if b"<svg" in lower and lower.startswith(b"<"):
        return "an SVG drawing; send it as PNG"
    if lower.startswith(b"<?xml"):
        return "an XML document"
    if text[:1] in (b"{", b"["):
        return "a JSON text"
    try:
        plain = head.decode("utf-8", errors="strict" if len(head) < _SEEN else "ignore")
    except UnicodeDecodeError:
        return None
    printable = all(character.isprintable() or character in "\r\n\t\f" for character in plain)
    return "a text" if plain.strip() and printable else None


PACKAGE = "pypdfium2"
MAX_PAGES = 100
"""Pages of a document that become pictures; longer documents are refused."""
_POINTS_PER_INCH = 72
_DOTS_PER_INCH = 144
_LONGEST = 2048
"""Pixels of a page's longer side at most: a poster is not more legible for a model."""
_DOMAIN = b"vlm-serve PDF page 1\0"
_NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class PdfPage:
    """A page of a document: its bytes and the page's index."""

    document: bytes
    index: int

    @property
    def packed(self) -> bytes:
        """The page as a file."""
        return _DOMAIN + self.index.to_bytes(_NUMBER_BYTES, "little") + self.document


def is_page(data: bytes | memoryview) -> bool:
    """Return True for a file made by `PdfPage.packed`."""
    return bytes(data[: len(_DOMAIN)]) == _DOMAIN


@cache
def renderer() -> str | None:
    """Return the package that renders pages, with its version; None if it is not installed."""
    try:
        return f"{PACKAGE} {version(PACKAGE)}"
    except PackageNotFoundError:
        return None


def count_pages(document: bytes) -> int:
    """Return the number of pages. Raises MediaError for a broken, encrypted or empty document."""
    with _opened(document) as pdf:
        if not len(pdf):
            raise MediaError("the PDF document has no pages")
        for index in range(min(len(pdf), MAX_PAGES)):
            _page(pdf, index)
        return len(pdf)


def render_page(data: bytes, limits: MediaLimits) -> PIL.Image.Image:
    """Render a packed page on white: 144 dots an inch, up to 2048 pixels a side, mode RGB.

    Raises MediaError if the document is broken, or its page has no size.
    """
    start = len(_DOMAIN) + _NUMBER_BYTES
    index = int.from_bytes(data[len(_DOMAIN) : start], "little")
    with _opened(data[start:]) as pdf:
        page, width, height = _page(pdf, index)
        scale = min(_DOTS_PER_INCH / _POINTS_PER_INCH, _LONGEST / max(width, height))
        area = width * height * scale * scale
        if area > limits.max_image_pixels:
            scale *= (limits.max_image_pixels / area) ** 0.5 * 0.99
        bitmap = page.render(scale=scale, rev_byteorder=True, prefer_bgrx=False)
        picture: PIL.Image.Image = bitmap.to_pil()
        return picture.convert("RGB")


def _page(pdf: Any, index: int) -> tuple[Any, float, float]:
    """Return a page with its size in points. Raises MediaError if it has none."""
    page = pdf[index]
    width, height = page.get_size()
    if not (0 < width < float("inf") and 0 < height < float("inf")):
        raise MediaError("a page of the document has no size")
    return page, width, height


@contextlib.contextmanager
def _opened(document: bytes) -> Iterator[Any]:
    pdfium = import_module(PACKAGE)
    try:
        with contextlib.closing(pdfium.PdfDocument(document)) as pdf:
            pdf.init_forms()
            yield pdf
    except pdfium.PdfiumError as error:
        why = "needs a password" if "password" in str(error).lower() else "is damaged"
        raise MediaError(f"the PDF document {why}") from None
