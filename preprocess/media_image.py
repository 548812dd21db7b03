"""Encoded images and PIL images to upright 8-bit RGB.

Transparency is composed over white as transformers does (`image_transforms.convert_to_rgb`), with
the same Pillow calls, hence the same bits. Two things transformers leaves alone are settled here:
EXIF orientation is always applied, and 16-bit samples keep their upper byte instead of clipping.
"""

from __future__ import annotations

import io
import threading

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageOps

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.limits import MediaLimits

Pixels = npt.NDArray[np.uint8]

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
_WHITE = (255, 255, 255, 255)
# A lazily opened image must not be loaded by two threads at once.
_load_lock = threading.Lock()


def decode_image(data: bytes, limits: MediaLimits, param: str | None = None) -> Pixels:
    """Pixels of an encoded image (the first frame of an animated one).

    Args:
        data: the file's bytes; formats are those in `FORMATS`.
        limits: bytes and pixels allowed; pixels are read from the header before decoding.
        param: the request field to name in errors.

    Returns:
        uint8 `[height, width, 3]`.

    Raises MediaError for anything that is not such an image, whole and within the limits.
    """
    if not data:
        raise MediaError("the image is empty", param=param)
    if len(data) > limits.max_image_bytes:
        raise MediaError(f"the image is over {limits.max_image_bytes} bytes", param=param)
    try:
        image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except PIL.UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise MediaError(f"not an image of a supported format ({known})", param=param) from None
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
        raise _too_many_pixels(limits, param) from None
    except Exception:  # Pillow's plugins raise whatever a broken header leads them to
        raise MediaError("the image is damaged", param=param) from None
    with image:
        return image_to_rgb(image, limits, param)


def image_to_rgb(image: PIL.Image.Image, limits: MediaLimits, param: str | None = None) -> Pixels:
    """Pixels of a PIL image of any mode, which stays as it is.

    Returns:
        uint8 `[height, width, 3]`.

    Raises MediaError if it is over the pixel limit, of an unsupported mode, or cannot be loaded.
    """
    if image.width * image.height > limits.max_image_pixels:
        raise _too_many_pixels(limits, param)
    if image.width == 0 or image.height == 0:
        raise MediaError("the image has no pixels", param=param)
    try:
        with _load_lock:
            image.load()
        upright = _upright(image)
        if upright.mode in ("I", "I;16", "I;16B", "I;16L", "I;16N"):
            return _from_16_bit(upright)
        if upright.mode == "F":
            raise MediaError("floating-point images are not supported", param=param)
        return np.array(_over_white(upright))
    except MediaError:
        raise
    except Exception:  # see above; truncated data ends here
        raise MediaError("the image is truncated or damaged", param=param) from None


def _too_many_pixels(limits: MediaLimits, param: str | None) -> MediaError:
    return MediaError(f"the image is over {limits.max_image_pixels} pixels", param=param)


def _upright(image: PIL.Image.Image) -> PIL.Image.Image:
    try:
        return PIL.ImageOps.exif_transpose(image)
    except Exception:  # broken EXIF says nothing about the pixels
        return image


def _over_white(image: PIL.Image.Image) -> PIL.Image.Image:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    background = PIL.Image.new("RGBA", image.size, _WHITE)
    return PIL.Image.alpha_composite(background, image).convert("RGB")


def _from_16_bit(image: PIL.Image.Image) -> Pixels:
    samples = np.asarray(image).astype(np.int64)
    grey = (np.clip(samples, 0, 0xFFFF) >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[samples == transparent] = 0xFF
    return np.repeat(grey[:, :, None], 3, axis=2)
