"""Requests that share something are neighbours, and one of them goes first."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_serve.batch.order import ReuseKey, ReuseQueue, ordered, reuse_key_of
from vlm_serve.preprocess.reading.reader import APIS

CHAT = "/v1/chat/completions"


def asking(text: str, *urls: str, **fields: Any) -> dict[str, Any]:
    media = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*media, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], **fields}


def test_requests_about_the_same_media_stand_together_in_the_order_of_their_text() -> None:
    bodies = [asking("b", "x"), asking("a", "y"), asking("a", "x"), asking("b", "y")]
    assert ordered([reuse_key_of(CHAT, body) for body in bodies]) == [2, 0, 1, 3]


def test_shared_prefixes_are_neighbours() -> None:
    prompts = ["one two three", "seven", "one two", "seven eight", "one"]
    order = ordered([reuse_key_of("/v1/completions", {"prompt": prompt}) for prompt in prompts])
    first = [prompts[index].split()[0] for index in order]
    assert first in (["one"] * 3 + ["seven"] * 2, ["seven"] * 2 + ["one"] * 3)


def test_a_tenant_is_never_in_anothers_group() -> None:
    mine = reuse_key_of(CHAT, asking("a", "x", cache_salt="me"))
    yours = reuse_key_of(CHAT, asking("a", "x", cache_salt="you"))
    assert mine.group != yours.group
    assert mine.group == reuse_key_of(CHAT, asking("b", "x", cache_salt="me")).group


def test_media_are_found_in_the_forms_of_every_api() -> None:
    def chat(kind: str, **part: Any) -> ReuseKey:
        return reuse_key_of(
            CHAT, {"messages": [{"role": "user", "content": [{"type": kind, **part}]}]}
        )

    url = "data:image/png;base64,AAAA"
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    keys = [
        chat("image_url", image_url=url),
        chat("image_url", image_url={"url": url}),
        chat("image", image=url),
        chat("video_url", video_url=url),
        reuse_key_of("/v1/responses", {"input": [item]}),
        reuse_key_of("/v1/messages", {"messages": [message]}),
    ]
    assert len({key.media for key in keys}) == 1
    assert len(keys[0].media) == 1


def test_prompts_of_token_ids_share_their_beginnings() -> None:
    prompts = [[5, 6, 7], [9], [5, 6, 8]]
    keys = [reuse_key_of("/inference/v1/generate", {"token_ids": ids}) for ids in prompts]
    assert ordered(keys) == [0, 2, 1]


@pytest.mark.parametrize("path", [*APIS, "/v1/no/such/route"])
@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"messages": 5, "input": 5, "prompt": 5, "token_ids": 5},
        {"messages": [None], "input": [None], "prompt": [None], "token_ids": [None]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]},
        {"prompt": [[1], [2]]},
    ],
)
def test_malformed_bodies_do_no_harm(path: str, body: Any) -> None:
    assert reuse_key_of(path, body).media == ()


def test_the_first_of_a_group_runs_before_the_others() -> None:
    queue = ReuseQueue([ReuseKey(media=(name,), text=str(n)) for n, name in enumerate("aabba")])
    assert [queue.take() for _ in range(3)] == [0, 2, None]
    queue.ended(2)
    assert [queue.take() for _ in range(2)] == [3, None]
    queue.ended(0)
    queue.ended(3)
    assert [queue.take() for _ in range(3)] == [1, 4, None]
