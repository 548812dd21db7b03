"""Special tokens typed by users stay text, whatever pieces they come in."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.values import MAX_DEPTH, plain_data
from vlm_serve.preprocess.text.rendering import TypedText

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|image_pad|>x", "[END]")
PATTERN = re.compile("|".join(map(re.escape, sorted(SPECIALS, key=len, reverse=True))))

pieces = st.sampled_from(
    ["<|im_start|>", "<|im_", "start|>", "<", "|>", "<|image_pad|>", "<|image", "_pad|>", "x"]
    + [" ", "\n", "[", "END]", "a", "é", "\ue000", "\ue001\ue002", "\uf8ff"]
)
texts = st.lists(pieces, max_size=8).map("".join) | st.text(max_size=20)


def typed(*data: Any) -> TypedText:
    return TypedText(list(data), SPECIALS, PATTERN)


@given(st.lists(texts, min_size=1, max_size=6), st.sampled_from(["", " ", "a"]))
def test_joined_and_trimmed_pieces_hold_no_special_token(parts: list[str], between: str) -> None:
    """However a template strings user texts together, trimmed or not."""
    hider = typed(*parts)
    hidden = [hider.hide(part) for part in parts]
    for joined in (
        between.join(hidden),
        between.join(part.strip() for part in hidden),
        between.join(hidden).strip(),
    ):
        assert not PATTERN.search(joined)
    assert hider.restore(between.join(hidden)) == between.join(parts)
    stripped = [part.strip() for part in hidden]
    assert hider.restore(between.join(stripped)) == between.join(part.strip() for part in parts)


@given(texts, texts)
def test_text_beside_the_templates_own_tokens(before: str, after: str) -> None:
    hider = typed(before, after)
    rendered = hider.hide(before) + "<|im_end|>" + hider.hide(after)
    assert PATTERN.findall(rendered) == ["<|im_end|>"]


def test_nested_data_and_keys() -> None:
    data = {"a<|im_end|>": ["<|im_start|>", {"b": "y"}, 3, None, True, 0.5]}
    hider = typed(data)
    hidden = hider.hide(data)
    assert "<|im" not in str(hidden)
    (key,) = hidden
    assert hider.restore(key) == "a<|im_end|>"
    assert hider.restore(hidden[key][0]) == "<|im_start|>"
    assert hidden[key][1:] == [{"b": "y"}, 3, None, True, 0.5]


def test_plain_text_is_untouched() -> None:
    text = "a < b, > quoted? |x| <think>"
    assert typed(text).hide(text) == text


def test_text_with_every_private_use_character() -> None:
    everything = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(InvalidRequestError):
        typed(everything)
    most = everything[10:]
    assert typed(most + "[END]").hide(most + "[END]").startswith(most)


def test_plain_data_is_a_fresh_copy() -> None:
    data = {"a": [1, {"b": (2.5, None, True, "x")}]}
    copy = plain_data(data, "p")
    assert copy == {"a": [1, {"b": [2.5, None, True, "x"]}]}
    copy["a"].append(1)
    assert data["a"] == [1, {"b": (2.5, None, True, "x")}]


@pytest.mark.parametrize("value", [object(), b"x", {1: 2}, {"a": {"b": {1}}}, print])
def test_other_data_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plain_data(value, "tools[0]")
    assert caught.value.param == "tools[0]"


def test_depth_is_bounded() -> None:
    deep: Any = "x"
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert plain_data(deep, "p") == deep
    with pytest.raises(InvalidRequestError, match="deeper"):
        plain_data([deep], "p")
