"""Finds the tokens of media and the expander of their placeholders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.preprocess.expand import Expander, VisionTokens
from vlm_serve.preprocess.expand_slices import SliceExpander, find_slice_tokens
from vlm_serve.preprocess.media_processors import Processor
from vlm_serve.preprocess.slice_config import SliceConfig
from vlm_serve.preprocess.tokenizer import Tokenizer


def find_vision_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> VisionTokens:
    """Return the vision tokens in config.json, by default the family's.

    Raises CheckpointError if one is not a special token.
    """
    family = tokenizer.family

    def find(name: str, token: str) -> int:
        given = config.get(name)
        token_id = tokenizer.token_to_id(token) if given is None else given
        if not isinstance(token_id, int) or not tokenizer.is_special(token_id):
            raise CheckpointError(f"{name} of the checkpoint is not a special token")
        return token_id

    around = ("vision_start_token_id", "vision_end_token_id")
    if family.slice_start is not None:
        around = ("image_start_id", "image_end_id")
    return VisionTokens(
        image_pad=find("image_token_id", family.image_pad),
        video_pad=find("video_token_id", family.video_pad),
        vision_start=find(around[0], family.vision_start),
        vision_end=find(around[1], family.vision_end),
    )


def find_expander(
    tokenizer: Tokenizer,
    config: Mapping[str, Any],
    vision: VisionTokens,
    *processors: Processor | None,
) -> Expander:
    """Return the expander of placeholders for a model with these processors.

    Raises CheckpointError if the processors disagree or a token is missing.
    """
    configs = [each.config for each in processors if each is not None]
    if len({each.merge_size for each in configs}) > 1:
        raise CheckpointError("image and video processors disagree on merge_size")
    if tokenizer.family.slice_start is None:
        return Expander(tokenizer, vision)
    numbered = all(each.numbered for each in configs if isinstance(each, SliceConfig))
    return SliceExpander(tokenizer, vision, find_slice_tokens(tokenizer, config), numbered=numbered)
