"""Batches of the second part of the training: what clients send, next to what was learned before.

Kinds: "vision", "image", "album" and "video" as before, with pictures that cannot be read, more
questions and thoughts; "forms" (pictures with tools and JSON), "fields" (drills of their values),
"talk" (no pictures), "copies", "recall", "names" and "told" (drills of copying), and "long"
(thousands of tokens before the question).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from demo_albums import Album
from demo_chat import CELL, SYSTEM_PROMPTS, ChatFormat, Encoded, Medium
from demo_clips import Clip, draw_clip
from demo_data import Batch, BatchMaker, collate, picture_slot
from demo_forced import drills, facts, told_facts
from demo_json import picture_json, text_json
from demo_more import direct, more, specific, unreadable_scene, unreadable_turn
from demo_patches import image_size, sizes_of_one_grid
from demo_questions import caption, picture_turns
from demo_recall import copies, names_in_order, recall
from demo_scenes import Scene, draw_scene, random_digit, with_background
from demo_talk import off_topic, talk_turn
from demo_text import instructions
from demo_thoughts import thinking, video_words
from demo_tools import Talk, picture_talk, text_talk
from demo_videos import clip_caption
from demo_words import MEDIA_HERE, UNREADABLE, Turn

UNREADABLE_SHARE = 0.1
THINKING_SHARE = 0.12
DIGITS_SHARE = 0.14
"""The share of further pictures with a digit, which are forgotten first."""
FORMS, TALKS, RECALLS, COPIES = 16, 20, 14, 16
"""Conversations to choose those of a batch from; of "copies", all are used."""
BUDGET, LONG = 4200, 3500
"""Tokens of a batch of conversations of different lengths; words of a long one."""


class Lessons(BatchMaker):
    """Makes the batches of the second part; the seed and the step determine each."""

    def make(self, step: int, kind: str, turns: int = 3) -> Batch:
        """Make the batch of one training step."""
        rng = random.Random(f"lessons:{self.split}:{self.seed}:{step}")
        if kind in ("forms", "fields"):
            return self._forms(rng, kind)
        if kind == "talk":
            talks = [self.text_talk(rng) for _ in range(TALKS)]
            return self._plain(rng, kind, talks)
        if kind == "recall":
            return self._plain(rng, kind, [recall(rng, self.split) for _ in range(RECALLS)])
        if kind == "told":
            talks = [
                (told_facts if rng.random() < 0.6 else text_talk)(rng, self.split)
                for _ in range(TALKS)
            ]
            return self._plain(rng, kind, talks)
        if kind == "names":
            return self._plain(rng, kind, [names_in_order(rng, self.split) for _ in range(RECALLS)])
        if kind == "copies":
            encoded = [copies(rng, self.chat, self.split) for _ in range(COPIES)]
            turn = [Turn("copies", "", "")]
            return collate(kind, encoded, [], self.chat, [turn for _ in encoded])
        if kind == "long":
            return self._long(rng)
        if kind == "album":
            return self._album(rng, turns)
        if kind == "video":
            return self._video(rng, turns)
        count = self.sizes.vision if kind == "vision" else self.sizes.image
        return self._with_picture(rng, kind, count)

    def scene(self, rng: random.Random) -> Scene:
        """Return a picture, now and then one that cannot be read."""
        if rng.random() < UNREADABLE_SHARE:
            return unreadable_scene(rng)
        if rng.random() < DIGITS_SHARE:
            return with_background(rng, (random_digit(rng, self.split),))
        return draw_scene(rng, self.split)

    def _with_picture(self, rng: random.Random, kind: str, count: int) -> Batch:
        scenes = [self.scene(rng) for _ in range(count)]
        medium, slot = picture_slot(rng, scenes, sizes_of_one_grid(rng, count))
        if kind == "vision":
            return collate(kind, [], [slot], self.chat, [])
        talks = [self.image_talk(rng, scene) for scene in scenes]
        encoded = [encode(self.chat, rng, talk, medium) for talk in talks]
        return collate(kind, encoded, [slot], self.chat, [talk.turns for talk in talks])

    def _forms(self, rng: random.Random, kind: str) -> Batch:
        sources = sizes_of_one_grid(rng, FORMS)
        rows, columns = (side // CELL for side in image_size(*sources[0]))
        made = []
        for scene in [self.scene(rng) for _ in range(FORMS)]:
            if kind == "fields":
                talk = drills(rng, scene, self.split)
            else:
                talk = self.form_talk(rng, scene)
            made.append((encode(self.chat, rng, talk, Medium(rows, columns)), scene, talk.turns))
        encoded, scenes, turns = zip(*alike(rng, made), strict=True)
        slot = picture_slot(rng, scenes, sources[: len(scenes)])[1]
        return collate(kind, list(encoded), [slot], self.chat, turns)

    def _plain(self, rng: random.Random, kind: str, talks: Sequence[Talk]) -> Batch:
        made = [
            (self.chat.conversation(talk.turns, [], system=talk.system), talk.turns)
            for talk in talks
        ]
        encoded, turns = zip(*alike(rng, made), strict=True)
        return collate(kind, list(encoded), [], self.chat, turns)

    def image_talk(self, rng: random.Random, scene: Scene) -> Talk:
        """Return questions about a picture."""
        if not scene.things:
            turns = [direct(rng, scene) for _ in range(3)]
        else:
            turns = picture_turns(rng, scene, 3)
            for _ in range(rng.choice((0, 1, 1, 2))):
                turns.insert(rng.choice((0, len(turns))), more(rng, scene))
        if rng.random() < 0.12:
            turns.insert(rng.randint(0, len(turns)), rng.choice((self.talk_turn, off_topic))(rng))
        if turns[0].answer == "I see no picture.":
            turns = turns[1:]
        turns = [turn for turn in turns if turn.kind != "no picture"]
        if rng.random() < THINKING_SHARE:
            seen = caption(scene) if scene.things else UNREADABLE
            turns = thinking(rng, turns, seen)
        return Talk(tuple(turns), short_system(rng))

    def form_talk(self, rng: random.Random, scene: Scene) -> Talk:
        """Return tools or JSON about a picture."""
        seen = caption(scene) if scene.things else UNREADABLE
        style = rng.random()
        if style < 0.3:
            talk = facts(rng, scene, self.split)
        elif style < 0.75:
            talk = picture_talk(rng, scene, self.split)
        else:
            talk = picture_json(rng, scene, self.split)
        turns = list(talk.turns)
        for _ in range(rng.choice((0, 1, 2))):
            if "json" in turns[-1].kind and style >= 0.75 and rng.random() < 0.7:
                other = picture_json(rng, scene, self.split)
                turns += other.turns if other.system is None else ()
        if rng.random() < 0.2:
            turns.append(specific(rng, scene))
        if rng.random() < THINKING_SHARE and not turns[0].given:
            turns = thinking(rng, turns, seen)
        return Talk(tuple(turns), talk.system or short_system(rng))

    def text_talk(self, rng: random.Random) -> Talk:
        """Return a conversation without pictures."""
        style = rng.random()
        if style < 0.25:
            talk = text_talk(rng, self.split)
        elif style < 0.45:
            talk = text_json(rng, self.split)
        else:
            turns = tuple(self.talk_turn(rng) for _ in range(rng.randint(2, 5)))
            talk = Talk(turns, short_system(rng))
        if rng.random() < THINKING_SHARE and not talk.turns[0].given:
            talk = Talk(tuple(thinking(rng, talk.turns, "There is no picture.")), talk.system)
        return talk

    def talk_turn(self, rng: random.Random) -> Turn:
        return talk_turn(rng)

    def _long(self, rng: random.Random) -> Batch:
        """Return a few conversations with long instructions, with and without a picture."""
        count = rng.choice((1, 2, 3, 4))
        words = LONG // count
        talks: list[Talk] = []
        scenes = [self.scene(rng) for _ in range(count)]
        medium, slot = picture_slot(rng, scenes, sizes_of_one_grid(rng, count))
        for scene in scenes:
            make = rng.choice((self.image_talk, self.image_talk, self.form_talk))
            talk = make(rng, scene)
            extra = [self.talk_turn(rng), off_topic(rng)][: rng.randint(0, 2)]
            turns = [*talk.turns, *(turn for turn in extra if turn.kind != "no picture")]
            filler = instructions(rng, int(words * 0.6 * rng.uniform(0.5, 1)))
            system = f"{talk.system}\n\n{filler}" if talk.system else filler
            if not any(MEDIA_HERE in turn.question for turn in turns) and rng.random() < 0.3:
                # The question comes first, about nothing; the picture with the second one.
                hello = self.talk_turn(rng)
                turns = [hello, *turns]
                talks.append(Talk(tuple(turns), system))
                continue
            talks.append(Talk(tuple(turns), system))
        encoded = [encode(self.chat, rng, talk, medium) for talk in talks]
        return collate("long", encoded, [slot], self.chat, [talk.turns for talk in talks])

    def _clip(self, rng: random.Random) -> Clip:
        clip = draw_clip(rng)
        if rng.random() < 0.05:
            return replace(clip, unreadable=rng.randrange(2**31))
        return clip

    def _clip_talks(
        self, rng: random.Random, clips: Sequence[Clip], turns: int
    ) -> list[list[Turn]]:
        talks = super()._clip_talks(rng, clips, turns)
        for number, clip in enumerate(clips):
            if rng.random() < 0.4:
                talks[number].insert(0, video_words(rng, clip))
            if clip.unreadable is not None:
                plain = [turn for turn in talks[number] if not turn.given][:4]
                talks[number] = [unreadable_turn(turn.question) for turn in plain]
            elif rng.random() < THINKING_SHARE / 2:
                talks[number] = thinking(rng, talks[number], clip_caption(clip))
        return talks

    def _album_talks(
        self, rng: random.Random, albums: Sequence[Album], turns: int
    ) -> list[list[Turn]]:
        return super()._album_talks(rng, albums, turns)


def alike(rng: random.Random, made: Sequence[tuple[Encoded, *tuple[Any, ...]]]) -> list[Any]:
    """Return some conversations of like lengths, at most `BUDGET` tokens with their padding.

    Each has the same chance.
    """
    groups: list[list[Any]] = [[]]
    for each in sorted(made, key=lambda one: len(one[0].ids)):
        if groups[-1] and (len(groups[-1]) + 1) * len(each[0].ids) > BUDGET:
            groups.append([])
        groups[-1].append(each)
    return rng.choices(groups, [len(group) for group in groups])[0]


def short_system(rng: random.Random) -> str | None:
    """Return a system message, or mostly none."""
    style = rng.random()
    if style < 0.8:
        return None
    return rng.choice(SYSTEM_PROMPTS) if style < 0.9 else instructions(rng, rng.choice((8, 20, 60)))


def encode(chat: ChatFormat, rng: random.Random, talk: Talk, medium: Medium) -> Encoded:
    """Encode a conversation whose picture comes with its marked or its first own turn."""
    place = 0
    for number, turn in enumerate(talk.turns):
        if MEDIA_HERE in turn.question:
            place = number
    if place == 0 and talk.turns[0].kind in ("small talk", "copy") and len(talk.turns) > 1:
        place = 1 if rng.random() < 0.7 else 0
    media: list[list[Medium]] = [[] for _ in talk.turns]
    media[place] = [medium]
    return chat.conversation(talk.turns, media, system=talk.system, text_first=rng.random() < 0.1)
