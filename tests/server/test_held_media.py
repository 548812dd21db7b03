"""Media that are held under names: bounds, ages, owners, and what open requests still use."""

from __future__ import annotations

import gc

import pytest

from vlm_serve.errors import MediaNotHeldError, UnsupportedFieldError
from vlm_serve.preprocess.reading.conversation import MediaName, MediaPart
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.server.held_media import (
    ALL_KEYS,
    HELD_SECONDS,
    RECORD_BYTES,
    ClientMedia,
    HeldMedia,
)
from vlm_serve.server.http.auth import Owner

OWNER, LIMIT = Owner(b"a", ""), 100_000


def part(size: int = 1000, letter: str = "x") -> MediaPart:
    return MediaPart("image", "data:," + letter * size, {}, "image", url_only=True)


def uuid(name: str) -> MediaName:
    return MediaName("uuid", name)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def names(held: HeldMedia, owner: Owner = OWNER) -> list[str]:
    account = held._accounts.get(owner.key)
    return [] if account is None else [name[2].partition(":")[2] for name in account.names]


def test_a_name_is_found_by_its_owner_and_kind_alone() -> None:
    held = HeldMedia(LIMIT)
    held.put(OWNER, uuid("p"), part())
    found = held.find(OWNER, "image", uuid("p"))
    assert found is not None and found.source == part().source
    for owner, modality, name in (
        (Owner(b"b", ""), "image", uuid("p")),
        (Owner(b"a", "salt"), "image", uuid("p")),
        (OWNER, "video", uuid("p")),
        (OWNER, "image", uuid("q")),
        (OWNER, "image", MediaName("hash", "p")),
    ):
        assert held.find(owner, modality, name) is None


def test_the_least_recently_used_goes_first_and_counts_are_exact() -> None:
    held = HeldMedia(LIMIT)
    for name in "abc":
        held.put(OWNER, uuid(name), part(30_000, name))
    assert held.find(OWNER, "image", uuid("a")) is not None
    held.put(OWNER, uuid("d"), part(30_000, "d"))
    assert names(held) == ["c", "a", "d"] and held.num_bytes <= LIMIT
    held.put(OWNER, uuid("e"), part(LIMIT))
    assert names(held) == ["c", "a", "d"]
    held.clear()
    assert held.num_bytes == 0 and names(held) == []


def test_names_of_one_medium_share_its_memory() -> None:
    held = HeldMedia(LIMIT)
    named = held.put(OWNER, uuid("a"), part())
    one = held.num_bytes
    held.put(OWNER, MediaName("hash", "h"), named)
    assert held.num_bytes == one + RECORD_BYTES
    held.put(OWNER, uuid("a"), part())
    assert held.num_bytes == one + RECORD_BYTES


def test_another_medium_of_a_name_replaces_the_first() -> None:
    held = HeldMedia(LIMIT)
    held.put(OWNER, uuid("a"), part(letter="x"))
    before = held.num_bytes
    held.put(OWNER, uuid("a"), part(letter="y"))
    found = held.find(OWNER, "image", uuid("a"))
    assert found is not None and found.source == part(letter="y").source
    assert held.num_bytes == before


def test_names_age() -> None:
    clock = Clock()
    held = HeldMedia(LIMIT, clock)
    held.put(OWNER, uuid("a"), part())
    held.put(OWNER, uuid("b"), part())
    clock.now = HELD_SECONDS / 2
    assert held.find(OWNER, "image", uuid("a")) is not None
    clock.now = HELD_SECONDS + 1
    assert held.find(OWNER, "image", uuid("b")) is None
    assert held.find(OWNER, "image", uuid("a")) is not None
    clock.now = 3 * HELD_SECONDS
    assert held.num_bytes == 0


def test_what_a_request_uses_counts_after_its_eviction() -> None:
    """Otherwise requests that name one medium each would hold any number of them uncounted."""
    held = HeldMedia(LIMIT)
    using = [held.put(OWNER, uuid(str(at)), part(40_000, str(at))) for at in range(2)]
    assert held.put(OWNER, uuid("new"), part(40_000)).held is None
    assert names(held) == [] and 80_000 < held.num_bytes <= LIMIT
    del using[0]
    gc.collect()
    assert held.put(OWNER, uuid("new"), part(40_000)).held is not None
    assert using[0].source == part(40_000, "1").source


def test_all_keys_together_have_a_bound_that_the_largest_pay_for() -> None:
    held = HeldMedia(LIMIT)
    owners = [Owner(bytes([key]), "") for key in range(ALL_KEYS)]
    for owner in owners:
        held.put(owner, uuid("old"), part(60_000))
        held.put(owner, uuid("large"), part(30_000))
    small = Owner(b"small", "")
    for at in range(3):
        held.put(small, uuid(str(at)), part(20_000))
    assert names(held, small) == ["0", "1", "2"]
    assert held.num_bytes <= ALL_KEYS * LIMIT
    left = [names(held, owner) for owner in owners]
    assert left.count(["large"]) == 1 and left.count(["old", "large"]) == ALL_KEYS - 1


def ask(media: ClientMedia, **fields: object) -> MediaPart:
    content = [{"type": "image_url", **fields}]
    body = {"messages": [{"role": "user", "content": content}]}
    (medium,) = read_conversation("chat", body, media).media
    return medium


@pytest.mark.parametrize("missing", [{"image_url": None}, {}, {"image_url": {"url": None}}])
def test_a_uuid_stands_for_what_was_sent_with_it(missing: dict[str, object]) -> None:
    media = ClientMedia(HeldMedia(LIMIT), None, OWNER, OWNER)
    sent = ask(media, image_url={"url": "data:,x"}, uuid="p")
    named = ask(media, **missing, uuid="p", max_pixels=9999)
    assert (named.source, named.options) == (sent.source, {"max_pixels": 9999})
    for other in ("q", "P"):
        with pytest.raises(MediaNotHeldError, match=f"no medium 'uuid:{other}'") as caught:
            ask(media, **missing, uuid=other)
        assert (caught.value.status, caught.value.code) == (409, "media_not_held")
        assert caught.value.param == "messages[0].content[0].uuid"


def test_a_server_that_holds_nothing_says_so() -> None:
    media = ClientMedia(None, None, OWNER, OWNER)
    assert ask(media, image_url="data:,x", uuid="p").source == "data:,x"
    for fields in ({"uuid": "p"}, {"image_url": "hash:" + "0" * 32}):
        with pytest.raises(UnsupportedFieldError, match="--media-store"):
            ask(media, **fields)


def test_a_hash_is_a_name_once_an_answer_tells_it() -> None:
    held = HeldMedia(LIMIT)
    digest = "0123456789abcdef" * 2
    for tells in (False, True):
        sent = ask(ClientMedia(held, None, OWNER, OWNER, tells), image_url="data:,x")
        assert (sent.on_loaded is not None) is tells
    assert sent.on_loaded is not None
    sent.on_loaded(digest)
    media = ClientMedia(held, None, OWNER, OWNER)
    assert ask(media, image_url={"url": f"hash:{digest}"}).source == "data:,x"
    for url in ("hash:", "hash:12", "hash:" + digest.upper()):
        with pytest.raises(Exception, match="32 digits of an item_hash"):
            ask(media, image_url=url)
