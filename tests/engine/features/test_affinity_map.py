"""What a cache is said to hold, by affinity key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cache_texts import END_OF_TURN, Image, Text
from cache_world import World, make_world

from vlm_serve.engine.features import affinity_map as affinity_module
from vlm_serve.engine.features.affinity_map import AffinityMap
from vlm_serve.engine.features.mirror import TreeMirror
from vlm_serve.preprocess.identity.affinity import affinity_keys_of_body
from vlm_serve.preprocess.identity.keys import PromptKeys

SYSTEM = [*range(10, 21), END_OF_TURN]
PICTURE = Image("cat", 8)


@dataclass(frozen=True)
class Places:
    keys: PromptKeys
    media_ends: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)


def chat(*turns: str, picture: str | None = None) -> tuple[bytes, ...]:
    """Affinity keys; turns alternate, the first is the system's, the second shows the picture."""
    messages: list[dict[str, Any]] = []
    for number, text in enumerate(turns):
        content: list[Any] = [{"type": "text", "text": text}]
        if number == 1 and picture is not None:
            url = {"url": f"data:,{picture}"}
            content.insert(0, {"type": "image_url", "image_url": url})
        messages.append({"role": ["user", "assistant"][number % 2], "content": content})
    return affinity_keys_of_body("chat", {"messages": messages}, salt="", model="m")


class Held:
    """A cache with a map over it."""

    def __init__(self, *, has_state: bool = True) -> None:
        self.world: World = make_world(has_state=has_state)
        self.mirror = TreeMirror(self.world.cache.events)
        self.map = AffinityMap(self.mirror, has_state=has_state)

    def admit(
        self, text: Text, affinity: tuple[bytes, ...], media_ends: tuple[int, ...] = ()
    ) -> None:
        run = self.world.start(text)
        assert run is not None and self.world.step(run, len(text))
        self.world.close(run)
        self.mirror.publish()
        states = self.world.cache.snapshot_positions(text.keys, len(text))
        self.map.note(affinity, Places(text.keys, media_ends), states)

    def tokens(self) -> dict[bytes, int]:
        return dict(self.map.digest().entries)


def test_keys_end_at_nodes_with_a_state_at_or_before_their_places() -> None:
    held = Held()
    text = Text(SYSTEM, PICTURE, list(range(30, 50)))
    affinity = chat("s" * 48, "q" * 80, picture="cat")
    held.admit(text, affinity, (20,))
    end, media, system = affinity
    states = held.world.cache.snapshot_positions(text.keys, len(text))
    assert {12, 20} <= set(states)
    assert 24 in states, "a guess may be a block too deep, but not within the next medium"
    expected = {system: 12, media: 24, end: max(states)}
    assert held.tokens() == expected
    digest = held.map.digest()
    assert held.map.digest() == digest
    other = Text(SYSTEM, Image("dog", 8), list(range(60, 70)))
    held.admit(other, chat("s" * 48, "r" * 40, picture="dog"), (20,))
    assert held.map.digest().version > digest.version
    assert expected.items() <= held.tokens().items()
    oldest = [key for key, _ in held.map.digest().entries][-2:]
    assert oldest == [end, media], "the newest used first"


def test_without_states_every_block_counts() -> None:
    held = Held(has_state=False)
    text = Text(SYSTEM, list(range(30, 50)))
    affinity = chat("s" * 48, "q" * 80)
    held.admit(text, affinity)
    assert held.tokens() == {affinity[0]: 32, affinity[1]: 16}, "a guess may be a block too deep"


def test_what_is_evicted_is_told_no_more() -> None:
    held = Held()
    affinity = chat("s" * 48, "q" * 80)
    held.admit(Text(SYSTEM, list(range(30, 50))), affinity)
    before = held.map.digest()
    assert before.entries
    held.world.cache.flush()
    held.mirror.publish()
    after = held.map.digest()
    assert after.entries == () and after.version > before.version
    assert len(held.map) == 0


def test_a_prompt_that_lost_media_is_not_told() -> None:
    held = Held()
    held.admit(Text(SYSTEM, list(range(30, 50))), chat("s" * 48, "q" * 80, picture="cat"))
    assert held.tokens() == {}


def test_it_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(affinity_module, "MAX_NOTED_KEYS", 5)
    held = Held()
    text = Text(SYSTEM, list(range(30, 50)))
    for number in range(10):
        held.admit(text, chat(f"{number}" * 48, "q" * 80))
    assert len(held.map) == 5
    newest = chat("9" * 48, "q" * 80)
    assert held.map.digest(most=1).entries[0][0] == newest[0]
    assert newest[1] in held.tokens()
