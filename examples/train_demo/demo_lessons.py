"""Batches of the second part of the training: what clients send, next to what was learned before.

Kinds: "vision", "image", "album" and "video" as before, with pictures that cannot be read, more
questions and thoughts; "forms" (pictures with tools and JSON), "talk" (no pictures) and "long"
(thousands of tokens before the question).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from demo_albums import Album
from demo_chat import SYSTEM_PROMPTS, ChatFormat, Encoded, Medium
from demo_clips import Clip, draw_clip
from demo_data import Batch, BatchMaker, collate, picture_slot
from demo_forced import forced_call, forms
from demo_json import picture_json, text_json
from demo_more import direct, more, unreadable_scene, unreadable_turn
from demo_patches import sizes_of_one_grid
from demo_questions import caption, picture_turns
from demo_recall import recall
from demo_scenes import Scene, draw_scene, random_digit, with_background
from demo_talk import off_topic, talk_turn
from demo_text import instructions
from demo_thoughts import thinking, video_words
from demo_tools import Talk, picture_talk, text_talk
from demo_videos import clip_caption
from demo_words import MEDIA_HERE, UNREADABLE, Turn

UNREADABLE_SHARE = 0.09
THINKING_SHARE = 0.12
FORMS, TALKS, RECALLS, LONG = 7, 12, 14, 3500


class Lessons(BatchMaker):
    """Makes the batches of the second part; the seed and the step determine each.

    With `copying`, calls and JSON need names and values from the prompt.
    """

    copying = False
    digits = 0.0
    """The share of further pictures with a digit, which are forgotten first."""

    def make(self, step: int, kind: str, turns: int = 3) -> Batch:
        """Make the batch of one training step."""
        rng = random.Random(f"lessons:{self.split}:{self.seed}:{step}")
        if kind == "forms":
            return self._with_picture(rng, kind, FORMS)
        if kind == "talk":
            talks = [self.text_talk(rng) for _ in range(TALKS)]
            return self._plain(rng, kind, talks)
        if kind == "recall":
            return self._plain(rng, kind, [recall(rng, self.split) for _ in range(RECALLS)])
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
        if rng.random() < self.digits:
            return with_background(rng, (random_digit(rng, self.split),))
        return draw_scene(rng, self.split)

    def _with_picture(self, rng: random.Random, kind: str, count: int) -> Batch:
        scenes = [self.scene(rng) for _ in range(count)]
        medium, slot = picture_slot(rng, scenes, sizes_of_one_grid(rng, count))
        if kind == "vision":
            return collate(kind, [], [slot], self.chat, [])
        make = self.form_talk if kind == "forms" else self.image_talk
        talks = [make(rng, scene) for scene in scenes]
        encoded = [encode(self.chat, rng, talk, medium) for talk in talks]
        return collate(kind, encoded, [slot], self.chat, [talk.turns for talk in talks])

    def _plain(self, rng: random.Random, kind: str, talks: Sequence[Talk]) -> Batch:
        encoded = [self.chat.conversation(talk.turns, [], system=talk.system) for talk in talks]
        return collate(kind, encoded, [], self.chat, [talk.turns for talk in talks])

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
        if not self.copying:
            talk = rng.choice((forced_call, forms))(rng, scene, self.split)
            return Talk(talk.turns, talk.system or short_system(rng))
        seen = caption(scene) if scene.things else UNREADABLE
        if rng.random() < 0.55:
            talk = picture_talk(rng, scene, self.split)
        else:
            talk = picture_json(rng, scene, self.split)
        turns = list(talk.turns)
        for _ in range(rng.choice((0, 1, 2))):
            if "json" in turns[-1].kind and rng.random() < 0.7:
                other = picture_json(rng, scene, self.split)
                turns += other.turns if other.system is None else ()
        if rng.random() < 0.2:
            turns.append(direct(rng, scene))
        if rng.random() < THINKING_SHARE and not turns[0].given:
            turns = thinking(rng, turns, seen)
        return Talk(tuple(turns), talk.system or short_system(rng))

    def text_talk(self, rng: random.Random) -> Talk:
        """Return a conversation without pictures."""
        style = rng.random()
        if style < 0.3 and not self.copying:
            return rng.choice((forced_call, forms))(rng, None, self.split)
        if style < 0.4 and self.copying:
            talk = text_talk(rng, self.split)
        elif style < 0.65 and self.copying:
            talk = text_json(rng, self.split)
        else:
            turns = tuple(self.talk_turn(rng) for _ in range(rng.randint(2, 5)))
            talk = Talk(turns, short_system(rng))
        if rng.random() < THINKING_SHARE and not talk.turns[0].given:
            talk = Talk(tuple(thinking(rng, talk.turns, "There is no picture.")), talk.system)
        return talk

    def talk_turn(self, rng: random.Random) -> Turn:
        return talk_turn(rng, copying=self.copying)

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
