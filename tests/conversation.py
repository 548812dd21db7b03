"""Conversations with media, for the tests of `prepare`."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from vlm_serve.preprocess.identity.keys import RootFields, WeightsIdentity
from vlm_serve.preprocess.prepare import Preprocessor

FIELDS = RootFields(
    weight_dtype="float32",
    compute_dtype="float32",
    memory="conv float32, kv float32",
    vision_dtype="float32",
    block_size=16,
    chunk_size=16,
)
WEIGHTS = WeightsIdentity(b"w" * 32, b"v" * 32)
Messages = list[dict[str, Any]]


def build(path: Path, **options: Any) -> Preprocessor:
    return Preprocessor(path, block_size=16, root_key=FIELDS, weights=WEIGHTS, **options)


def say(*parts: Any, role: str = "user") -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": content}


def picture(image: Any, **options: Any) -> dict[str, Any]:
    return {"type": "image", "image": image, **options}


def clip(video: Any, **options: Any) -> dict[str, Any]:
    return {"type": "video", "video": video, **options}


def frames(count: int, height: int = 64, width: int = 96, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def recorded(pictures: Any, rate: int = 10) -> bytes:
    """Record a video file of so many frames a second, without loss."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        stream: Any = output.add_stream("ffv1", rate=rate)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "bgr0"
        for picture in pictures:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def png_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]


def tool_conversation() -> Messages:
    call = {"type": "function", "id": "1", "function": {"name": "look", "arguments": {"at": "é"}}}
    return [
        say("where?"),
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "here"},
    ]


def record(file: Path, pictures: Any, rate: int) -> None:
    """Write a video file whose header counts frames, as the reference needs it."""
    with av.open(str(file), "w") as output:
        stream: Any = output.add_stream("mpeg4", rate=rate)
        stream.height, stream.width = pictures[0].shape[:2]
        for each in pictures:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(each, format="rgb24")))
        output.mux(stream.encode())
