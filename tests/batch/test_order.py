"""Requests that share something are neighbours, and one of them goes first."""

from __future__ import annotations

from typing import Any

from vlm_serve.batch.order import Affinity, Agenda, affinity_of, ordered


def asking(text: str, *urls: str, **fields: Any) -> dict[str, Any]:
    media = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*media, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], **fields}


def test_requests_about_the_same_media_stand_together_in_the_order_of_their_text() -> None:
    bodies = [asking("b", "x"), asking("a", "y"), asking("a", "x"), asking("b", "y")]
    assert ordered([affinity_of(body) for body in bodies]) == [2, 0, 1, 3]


def test_shared_prefixes_are_neighbours() -> None:
    prompts = ["one two three", "seven", "one two", "seven eight", "one"]
    order = ordered([affinity_of({"prompt": prompt}) for prompt in prompts])
    first = [prompts[index].split()[0] for index in order]
    assert first in (["one"] * 3 + ["seven"] * 2, ["seven"] * 2 + ["one"] * 3)


def test_a_tenant_is_never_in_anothers_group() -> None:
    mine = affinity_of(asking("a", "x", cache_salt="me"))
    yours = affinity_of(asking("a", "x", cache_salt="you"))
    assert mine.group != yours.group
    assert mine.group == affinity_of(asking("b", "x", cache_salt="me")).group


def test_media_are_found_in_every_form_and_malformed_bodies_do_no_harm() -> None:
    forms = ({"image_url": "u"}, {"image_url": {"url": "u"}}, {"image": "u"}, {"video_url": "u"})
    media = [affinity_of({"messages": [{"content": [part]}]}).media for part in forms]
    assert len(set(media)) == 1
    assert len(media[0]) == 1
    malformed: tuple[Any, ...] = (
        None,
        [],
        {},
        {"messages": 5},
        {"messages": [None]},
        {"prompt": [[1], [2]]},
    )
    for body in malformed:
        assert affinity_of(body).media == ()


def test_the_first_of_a_group_runs_before_the_others() -> None:
    affinities = [Affinity(media=(name,), text=str(n)) for n, name in enumerate("aabba")]
    agenda = Agenda(affinities)
    assert [agenda.take() for _ in range(3)] == [0, 2, None]
    agenda.ended(2)
    assert [agenda.take() for _ in range(2)] == [3, None]
    agenda.ended(0)
    agenda.ended(3)
    assert [agenda.take() for _ in range(3)] == [1, 4, None]
