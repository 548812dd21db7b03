"""What transformers makes of messages with images and videos."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import oracle
import PIL.Image
import torch


def _fetch_videos(urls: Any, sample_indices_fn: Any = None) -> Any:
    """`BaseVideoProcessor.fetch_videos` with PyAV, which it no longer picks by itself."""
    from transformers.video_utils import load_video

    if isinstance(urls, list):
        return list(zip(*[_fetch_videos(url, sample_indices_fn) for url in urls], strict=True))
    frames, metadata = load_video(urls, backend="pyav", sample_indices_fn=sample_indices_fn)
    return square_pixels(frames, urls), metadata


def square_pixels(frames: Any, file: Any) -> Any:
    """`[T, height, width, 3]` as players show them: transformers ignores the shape of pixels."""
    with av.open(file) as container:
        stream = container.streams.best("video")
        assert stream is not None
        aspect = stream.sample_aspect_ratio or 1
    if aspect == 1:
        return frames
    width = int(frames[0].shape[1] * aspect)
    resize = partial(PIL.Image.Image.resize, resample=PIL.Image.Resampling.BICUBIC)
    pictures = [PIL.Image.fromarray(frame) for frame in frames]
    return np.stack([np.asarray(resize(each, (width, each.height))) for each in pictures])


def processor(path: Path) -> Any:
    """transformers' processor of a checkpoint, able to read video files."""
    found = oracle.processor(path)
    if hasattr(found, "video_processor"):
        found.video_processor.fetch_videos = _fetch_videos
    return found


def inputs(
    path: Path,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    sanitize: bool = False,
    processor_kwargs: dict[str, Any] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """The tensors that transformers gives its model for a conversation."""
    found = processor(path)
    if hasattr(found, "image_processor"):  # else it is a tokenizer
        template_kwargs |= {
            "sanitize_control_tokens": sanitize,
            "processor_kwargs": processor_kwargs or {},
        }
    if hasattr(found, "audio_token"):
        template_kwargs["processor_kwargs"] |= {"return_metadata": True}
    output: dict[str, Any] = found.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **template_kwargs,
    )
    if "video_second_per_grid" in output:
        # The processor takes a rate of the call instead, one for all videos.
        rates = [each.sampled_fps for each in output.pop("video_metadata")]
        frames = found.video_processor.temporal_patch_size
        output["video_second_per_grid"] = torch.tensor([frames / rate for rate in rates])
    return output
