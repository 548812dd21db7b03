"""Identical text, other media: a false cache hit would be a wrong answer."""

from __future__ import annotations

from typing import Any

from demo_cases import image_part, video_part
from demo_clips import Clip, frame_count, render_clip
from demo_drawing import render
from demo_scenes import Background, Scene, Thing

from vlm_serve import Pipeline, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=96)
GREY = Background((190, 195, 200), (190, 195, 200), True, 0.0, 0)
RATE = 10


def picture(kind: str, colour: str) -> dict[str, Any]:
    thing = Thing(kind, colour, 0.5, 0.5, 0.3, True)
    return image_part(render(Scene((thing,), GREY), 96, 96))


def video(*things: tuple[str, str]) -> dict[str, Any]:
    """Eight seconds; each thing is shown for as long as the others."""
    shown = tuple(Thing(kind, colour, 0.5, 0.5, 0.28, True) for kind, colour in things)
    moments = tuple(8 // len(things) * number for number in range(len(things)))
    clip = Clip("sequence", 8, RATE, GREY, shown, moments)
    return video_part(render_clip(clip, list(range(frame_count(clip))), 64, 64), RATE)


def ask(pipe: Pipeline, question: str, *media: dict[str, Any]) -> str:
    text = {"type": "text", "text": question}
    return pipe.chat([{"role": "user", "content": [*media, text]}], GREEDY).text


def test_swapped_pictures(pipe: Pipeline) -> None:
    star, circle = picture("star", "red"), picture("circle", "blue")
    for _ in range(2):
        assert ask(pipe, "What do you see?", star) == "A red star in the middle."
        assert ask(pipe, "What do you see?", circle) == "A blue circle in the middle."


def test_pictures_in_the_other_order(pipe: Pipeline) -> None:
    star, circle = picture("star", "red"), picture("circle", "blue")
    for _ in range(2):
        assert ask(pipe, "What is in the first picture?", star, circle) == "A red star."
        assert ask(pipe, "What is in the first picture?", circle, star) == "A blue circle."


def test_second_picture_swapped(pipe: Pipeline) -> None:
    """The prompts share the whole first picture and differ in the second."""
    star = picture("star", "red")
    for kind, colour in (("circle", "blue"), ("square", "green"), ("heart", "yellow")):
        answer = ask(pipe, "What is in the second picture?", star, picture(kind, colour))
        assert answer == f"A {colour} {kind}."


def test_videos_with_a_common_first_half(pipe: Pipeline) -> None:
    ends = (("circle", "blue"), ("square", "green"))
    for kind, colour in (*ends, *ends):
        clip = video(("star", "red"), (kind, colour))
        assert ask(pipe, "Which object appears first?", clip) == "A red star."
        assert ask(pipe, "Which object appears last?", clip) == f"A {colour} {kind}."


def test_a_common_first_half_is_reused(pipe: Pipeline) -> None:
    question = {"type": "text", "text": "Which object appears last?"}
    reused = []
    for kind in ("heart", "cross", "star"):
        content = [video(("triangle", "purple"), (kind, "orange")), question]
        output = pipe.chat([{"role": "user", "content": content}], GREEDY)
        assert output.text == f"An orange {kind}."
        reused.append(output.usage.cached_tokens)
    # Four of eight temporal patches of 16 tokens are common. The second video finds their keys and
    # values without a state and leaves a snapshot there; the third finds both.
    assert reused[0] == 0
    assert reused[2] >= 4 * 16
