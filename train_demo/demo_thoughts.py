"""Short thoughts before answers, and the words that newcomers use for videos."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from demo_clips import Clip
from demo_videos import clip_caption
from demo_words import NO_PICTURE, REFUSAL, UNREADABLE, Turn, sentence

OPEN, CLOSE = "<think>\n", "\n</think>\n\n"


def thought_of(turn: Turn, seen: str) -> str:
    """Return what is thought before an answer."""
    if turn.kind == "small talk":
        return "They talk to me."
    if turn.kind == "copy":
        return "I repeat it."
    if turn.answer == NO_PICTURE:
        return "There is no picture."
    if turn.answer == UNREADABLE:
        return "I cannot read it."
    if turn.answer == REFUSAL:
        return "I do not know that."
    if turn.kind == "call":
        return "I call a tool."
    if turn.kind == "result":
        return "The tool has answered."
    if "json" in turn.kind and not seen.startswith("There is no"):
        return f"I see: {seen}"
    if "json" in turn.kind:
        return "I write JSON."
    return f"I see: {seen}"


def thinking(rng: random.Random, turns: Sequence[Turn], seen: str) -> list[Turn]:
    """Return the turns with thoughts before the last answer, or before all (as kept ones are)."""
    usable = [turn for turn in turns if turn.kind not in ("drill", "roster")]
    if not usable:
        return list(turns)
    everywhere = rng.random() < 0.4
    for number, turn in enumerate(usable):
        if everywhere or number + 1 == len(usable):
            parts = (OPEN, thought_of(turn, seen) + CLOSE, *turn.pieces)
            given = frozenset({0, *(place + 2 for place in turn.given)})
            usable[number] = replace(turn, answer="".join(parts), parts=parts, given=given)
    return usable


def video_words(rng: random.Random, clip: Clip) -> Turn:
    """Return a request for a description of a video in other words, or for a place."""
    if rng.random() < 0.25:
        where = {"flashes": "Everywhere.", "motion": ""}.get(clip.story, "In the middle.")
        if not where:
            way = clip.direction
            where = sentence(
                f"it moves to the {way}" if way in ("left", "right") else f"it moves {way}"
            )
        return Turn("video place", "Where is it?", where)
    asks = (
        "What happens in this video?",
        "Describe this video.",
        "What is in the video?",
        "What do you see?",
        "What do you see in the video?",
        "What is happening?",
        "Summarize the video.",
        "Describe the video briefly.",
        "What does the video show?",
        "What's in this video?",
        "Describe what happens.",
    )
    return Turn("video description", rng.choice(asks), clip_caption(clip))
