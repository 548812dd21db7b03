"""What the tokenizer and the chat template of a model family agree on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Fixed facts about prompts of a family.

    Attributes:
        split: the pattern at which transformers has texts of this family split into words, whatever
            tokenizer.json says; None: as the file has it.
        end_of_turn: the token behind every message.
        image_pad, video_pad: the tokens that stand for media, where the config names none.
        vision_start, vision_end: around them, likewise.
        timestamp: the text before a video's temporal patch, formatted with its seconds.
    """

    split: str | None = None
    end_of_turn: str = "<|im_end|>"
    image_pad: str = "<|image_pad|>"
    video_pad: str = "<|video_pad|>"
    vision_start: str = "<|vision_start|>"
    vision_end: str = "<|vision_end|>"
    timestamp: str = "<{:.1f} seconds>"


CHATML = Family()
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


_FAMILIES = {"qwen3_5": QWEN3_5, "qwen3_vl": QWEN2, "qwen3_next": QWEN2}
"""By what model types begin with."""


def family_of(model_type: str) -> Family:
    """The family of a model that nobody has given one."""
    known = (family for name, family in _FAMILIES.items() if model_type.startswith(name))
    return next(known, CHATML)
