"""Names everything that turns a file's bytes into pixels, besides options and processors.

This name is part of the key of upload records, and of nothing else. A content hash is made from the
pixels themselves, so servers with different decoders still share cached entries.
"""

from __future__ import annotations

import platform
from functools import cache
from importlib import import_module

import PIL
import torch
from blake3 import blake3
from PIL import features

from vlm_serve.preprocess.keys import tagged
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.pdf_pages import renderer
from vlm_serve.preprocess.picture_plugins import plugins

_DOMAIN = b"vlm-serve decoding path 2"
_LIMITS = (
    "max_image_pixels",
    "max_image_scans",
    "max_video_pixels",
    "max_video_frames",
    "max_video_seconds",
)
"""Media beyond these limits are refused, so a server must not reuse records made under other
limits."""


def decoding_path(limits: MediaLimits) -> bytes:
    """Return 32 bytes that name the decoders, the resize and the limits."""
    fields = [tagged("domain", _DOMAIN)]
    fields += [tagged(name, version) for name, version in sorted(libraries().items())]
    fields += [tagged(name, str(getattr(limits, name))) for name in _LIMITS]
    return blake3(b"".join(fields)).digest()


@cache
def libraries() -> dict[str, str]:
    """Return the versions of everything that decodes and resizes.

    Loads FFmpeg, which otherwise only the decoding processes load.
    """
    av = import_module("av")
    codecs = {name: features.version_codec(name) for name in features.codecs}
    modules = {name: features.version_module(name) for name in ("webp", "avif")}
    extras = {name: features.version_feature(name) for name in ("libjpeg_turbo", "zlib_ng")}
    found = {
        f"Pillow {name}": str(version) for name, version in (codecs | modules | extras).items()
    }
    found |= {f"FFmpeg {name}": str(version) for name, version in av.library_versions.items()}
    found |= {f"plugin {form}": package for form, package in plugins().items()}
    if (pages := renderer()) is not None:
        found["plugin PDF"] = pages
    found["PyAV"] = str(av.__version__)
    found["Pillow"] = PIL.__version__
    # torch does the resize, and its result differs between processors.
    found["torch"] = torch.__version__
    found["torch CPU capability"] = torch.backends.cpu.get_cpu_capability()
    found["machine"] = platform.machine()
    return found
