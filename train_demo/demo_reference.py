"""Answers of transformers to the same requests, from the same checkpoint files.

The oracle of the examples loads processor and model unchanged.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from demo_cases import Case

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))


@torch.no_grad()
def reference_tokens(checkpoint: Path, case: Case, max_tokens: int) -> list[int]:
    """Return the greedy tokens of one case in float32, including the end token."""
    import oracle  # Imports transformers, which only this comparison needs.

    processor = oracle.processor(checkpoint)
    inputs = _inputs(processor, case)
    model = oracle.model(checkpoint)
    output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    return [int(token) for token in output[0, inputs["input_ids"].shape[1] :]]


def _inputs(processor: Any, case: Case) -> dict[str, Any]:
    text = processor.apply_chat_template(_plain(case), add_generation_prompt=True, tokenize=False)
    parts = [part for part in case.messages[0]["content"] if part["type"] != "text"]
    images = [part["image"] for part in parts if part["type"] == "image"]
    videos = [part["video"] for part in parts if part["type"] == "video"]
    known: dict[str, Any] = {"text": [text], "return_tensors": "pt"}
    if images:
        known["images"] = images
    if videos:
        known["videos"] = [torch.from_numpy(video).permute(0, 3, 1, 2) for video in videos]
        known["video_metadata"] = [_metadata(part) for part in parts]
    return dict(processor(**known))


def _metadata(part: dict[str, Any]) -> Any:
    from transformers.video_utils import VideoMetadata

    total = len(part["video"])
    height, width = part["video"].shape[1:3]
    return VideoMetadata(
        total, fps=part["fps"], width=width, height=height, duration=total / part["fps"]
    )


def _plain(case: Case) -> list[dict[str, Any]]:
    """Return the messages without media, since the template only counts those."""
    found = []
    for message in case.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                part if part["type"] == "text" else {"type": part["type"]} for part in content
            ]
        found.append({"role": message["role"], "content": content})
    return found
