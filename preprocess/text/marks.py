"""Finds where cache marks stand in a rendered prompt, and in its tokens."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import AskedMark, CacheWishes, Conversation
from vlm_serve.preprocess.text.rendering import ChatRequest, Rendering, TypedText
from vlm_serve.preprocess.text.seams import Seams


def places_of(
    request: ChatRequest, typed: TypedText, text: str, wishes: CacheWishes
) -> tuple[tuple[int, float], ...]:
    """Return where marks stand in a prompt's text, ascending, each with its seconds.

    A mark stands where the text and a second rendering, with a sign in the mark's place, part. A
    template may trim what is before the sign, or look at it.
    """
    if wishes.marked is None or wishes.signs is None:
        return ()
    found: dict[int, float] = {}
    for mark in wishes.marks:
        marked = _rendered(request, typed, wishes.marked, mark, wishes.signs)
        before, sign, _ = marked.partition(mark.sign)
        if not sign:
            continue
        lengths = range(1, min(len(before), len(text)) + 1)
        differs = bisect_left(lengths, True, key=lambda size: before[:size] != text[:size])
        found[differs] = max(mark.seconds, found.get(differs, 0.0))
    return tuple(sorted(found.items()))


def _rendered(
    request: ChatRequest,
    typed: TypedText,
    marked: Conversation,
    mark: AskedMark,
    signs: re.Pattern[str],
) -> str:
    """Render the second reading for one mark; "" if the template refuses it.

    Signs of other marks are left out. One would part the texts before this mark, where a template
    trims, and so would a marked tool, behind which there is another one with the sign as its name.
    """

    def shown(tool: dict[str, Any]) -> bool:
        name = str(tool.get("function", tool).get("name"))
        return name == mark.sign or not signs.fullmatch(name)

    def kept(value: Any) -> Any:
        if isinstance(value, str):
            return signs.sub(lambda found: found[0] if found[0] == mark.sign else "", value)
        if isinstance(value, list):
            return [kept(each) for each in value if not is_other(each)]
        return (
            {key: kept(each) for key, each in value.items()} if isinstance(value, dict) else value
        )

    def is_other(part: Any) -> bool:
        text = part.get("text") if isinstance(part, dict) else None
        return isinstance(text, str) and text != mark.sign and bool(signs.fullmatch(text))

    tools = [tool for tool in marked.tools if shown(tool)]
    try:
        return request.render_marked(typed, replace(marked, messages=kept(marked.messages)), tools)
    except InvalidRequestError:
        return ""


def token_places(
    rendering: Rendering,
    piece_starts: Sequence[int],
    encode: Callable[[str], list[int]],
    seams: Seams,
) -> list[tuple[int, float]]:
    """Return the last position up to each mark that no text behind the mark can change.

    Args:
        piece_starts: number of tokens before each piece.
        encode: encodes text.
        seams: where a text may be cut.
    """
    ends = list(accumulate(len(piece.text) for piece in rendering.pieces))
    found = []
    for place, seconds in rendering.marks:
        index = bisect_right(ends, place)
        if index and ends[index - 1] == place and rendering.pieces[index - 1].is_special:
            position = piece_starts[index] if index < len(ends) else None
        else:
            # A text goes on behind a mark at its end, too: parts join without a separator.
            index = bisect_left(ends, place)
            before = rendering.pieces[index].text[: place - (ends[index - 1] if index else 0)]
            plain = rendering.typed.restore(before)
            cut = seams.last(plain)
            special = rendering.pieces[index].is_special
            position = piece_starts[index] + (len(encode(plain[:cut])) if not special else 0)
        if position:
            found.append((position, seconds))
    return found
