"""Conventions shared by the tokenizer and the chat template of a model family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

THINK_START = "<think>"
THINK_END = "</think>"
TOOL_START = "<tool_call>"
_TURN = "<|im_start|>"


@dataclass(frozen=True, slots=True)
class Family:
    """Fixed facts about the prompts of a family.

    Attributes:
        split: the regular expression with which transformers splits texts of this family into
            words, whatever tokenizer.json says; None: use the file's.
        end_of_turn: the token after every message.
        image_pad, video_pad: the placeholder tokens, where the config names none; "": such media
            are not taken.
        vision_start, vision_end: the tokens around them, likewise.
        timestamp: the text before a video's temporal patch, formatted with its seconds and its
            number; "": none, patches follow each other, and their positions tell the time.
        position_rate: where positions tell it, the field of `vision_config`, or beside it, with the
            positions of a second, and its default; None: each patch is one position later than
            the one before.
        frame_pixels: bounds of a video frame's pixels, whatever files say; None: the files'.
        slice_start, slice_end: the tokens around a slice's placeholders; None for families without
            slices.
        id_start, id_end: the tokens around a picture's number, likewise.
        numbered: the media with such numbers before them.
        tile, thumbnail: the tokens before a tile of a picture, formatted with its row and column,
            and before the whole picture behind them; None for families without tiles; "": no
            tokens, and a picture without tiles is squeezed into a square.
        downsample: `downsample_mode` of pictures in slices where files name none.
        positions: "mrope": a span is a grid of its own; "seconds": likewise, but times are not
            rounded, and text goes on behind a late one too; "count": all tokens, also of media,
            count up one by one; "canvas": a picture's slices lie side by side, under the whole
            picture.
    """

    split: str | None = None
    end_of_turn: str = "<|im_end|>"
    image_pad: str = "<|image_pad|>"
    video_pad: str = "<|video_pad|>"
    vision_start: str = "<|vision_start|>"
    vision_end: str = "<|vision_end|>"
    timestamp: str = "<{:.1f} seconds>"
    position_rate: tuple[str, int] | None = None
    frame_pixels: tuple[int, int] | None = None
    slice_start: str | None = None
    slice_end: str | None = None
    id_start: str | None = None
    id_end: str | None = None
    numbered: tuple[str, ...] = ()
    tile: str | None = None
    thumbnail: str | None = None
    downsample: str = "16x"
    positions: Literal["mrope", "seconds", "count", "canvas"] = "mrope"


CHATML = Family()
GRANITE = replace(CHATML, end_of_turn="<|end_of_text|>")
QWEN2 = Family(
    split=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
        r"|[^\r\n\p{L}\p{N}]?\p{L}+"
        r"|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+"
        r"|\s+(?!\S)"
        r"|\s+"
    )
)
QWEN2_VL = replace(QWEN2, timestamp="")
QWEN2_5_VL = replace(QWEN2_VL, position_rate=("tokens_per_second", 4))
QWEN3_OMNI = replace(
    QWEN2_VL,
    position_rate=("position_id_per_seconds", 25),
    frame_pixels=(128 * 32 * 32, 768 * 32 * 32),
    positions="seconds",
)
QWEN3_5 = Family(
    split=(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
        r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
        r"|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+"
        r"|\s+(?!\S)"
        r"|\s+"
    )
)

MINICPMV4_6 = Family(
    vision_start="<image>",
    vision_end="</image>",
    slice_start="<slice>",
    slice_end="</slice>",
    id_start="<image_id>",
    id_end="</image_id>",
    numbered=("image", "video"),
    positions="count",
)
MINICPMV4_7 = replace(MINICPMV4_6, numbered=("image",), positions="canvas")

LFM2_VL = Family(
    image_pad="<image>",
    video_pad="",
    vision_start="<|image_start|>",
    vision_end="<|image_end|>",
    tile="<|img_row_{}_col_{}|>",
    thumbnail="<|img_thumbnail|>",
    positions="count",
)

INTERNVL = replace(
    QWEN2,
    image_pad="<IMG_CONTEXT>",
    video_pad="<video>",
    vision_start="<img>",
    vision_end="</img>",
    timestamp="Frame{1}: ",
    tile="",
    thumbnail="",
    positions="count",
)

_FAMILIES = {
    "qwen3_5": QWEN3_5,
    "qwen3_vl": QWEN2,
    "cosmos3_omni": QWEN2,
    "qwen3_next": QWEN2,
    "qwen3_omni": QWEN3_OMNI,
    "qwen3": QWEN2,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_vl": QWEN2_VL,
    "qwen2": QWEN2,
    "minicpmv4_6": MINICPMV4_6,
    "minicpmv4_7": MINICPMV4_7,
    "lfm2_vl": LFM2_VL,
    "internvl": INTERNVL,
    "granitemoehybrid": GRANITE,
    "minicpm_ocr": replace(MINICPMV4_6, downsample="4x"),
}
"""By prefix of the model type."""


def family_of(model_type: str) -> Family:
    """Return the default family for a model type."""
    known = (family for name, family in _FAMILIES.items() if model_type.startswith(name))
    return next(known, CHATML)


def answering_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json with the fields of the part that answers in text among its own: of a
    model that speaks as well, only the thinker is served."""
    thinker = config.get("thinker_config")
    if not isinstance(thinker, Mapping):
        return config
    inner = {name: value for name, value in thinker.items() if name != "model_type"}
    return {name: value for name, value in config.items() if name != "thinker_config"} | inner


def begins_in_thought(prompt: str, *, continued: bool) -> bool:
    """Return True if the answer to a prompt with this text begins inside a `<think>` block.

    Args:
        continued: the answer continues the last message, whose thought may be open. A thought
            begins where the message or its text does; elsewhere `<think>` is a word of the text.
    """
    if not continued:
        return prompt.rstrip().endswith(THINK_START)
    turn = prompt.rfind(_TURN)
    if turn < 0:
        return prompt.rfind(THINK_START) > prompt.rfind(THINK_END)
    text = prompt[turn:].partition("\n")[2].rpartition(THINK_END)[2]
    return text.lstrip().startswith(THINK_START)


def leaves_thought_open(text: str) -> bool:
    """Return True if a prompt of unknown origin ends inside a thought.

    Outside of a chat template's turn, only `<think>` at the very end opens one.
    """
    return begins_in_thought(text, continued=_TURN in text)
