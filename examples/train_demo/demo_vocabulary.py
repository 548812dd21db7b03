"""The tokenizer of the shipped checkpoints, and the change to it from that of the first part."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from checkpoint_parts import CHAT_TEMPLATE, build_tokenizer
from demo_chat import SYSTEM_PROMPTS, ChatFormat, training_text
from demo_forms import TOOLS_HEAD
from demo_json import picture_json, text_json
from demo_scenes import draw_scene
from demo_talk import talk_turn
from demo_text import instructions
from demo_tools import picture_talk, text_talk
from tokenizers import Tokenizer
from train import Trainee

TEACHING_VOCABULARY = 2048


def teaching_text(count: int = 4000, seed: int = 1) -> Iterator[str]:
    """Return text like that of all conversations, and English and JSON."""
    yield from training_text(9000)
    yield from SYSTEM_PROMPTS * 300
    rng = random.Random(seed)
    for _ in range(count):
        scene = draw_scene(rng, "train")
        talks = (picture_talk, picture_json)[rng.random() < 0.4](rng, scene, "train")
        plain = (text_talk, text_json)[rng.random() < 0.4](rng, "train")
        for talk in (talks, plain):
            if talk.system:
                yield talk.system.replace(TOOLS_HEAD.partition("{tools}")[0], "")
            for turn in talk.turns:
                yield turn.question
                yield turn.answer
        turn = talk_turn(rng)
        yield f"{turn.question}\n{turn.answer}"
        yield instructions(rng, 150)
    for _ in range(20):
        yield TOOLS_HEAD
        yield CHAT_TEMPLATE


def teaching_tokenizer() -> Tokenizer:
    """Train the tokenizer; its bytes are reproducible."""
    return build_tokenizer(teaching_text(), TEACHING_VOCABULARY)


@torch.no_grad()
def widen(model: Trainee, old: ChatFormat, new: ChatFormat) -> Trainee:
    """Return the model with embeddings for the tokens of `new`.

    A token that `old` has keeps its embedding. Another starts as the mean of its parts, smaller,
    with some noise.
    """
    shape = replace(model.demo.shape, vocab=new.tokenizer.get_vocab_size())
    wide = Trainee(shape)
    state = model.state_dict()
    name = "demo.model.language_model.embed_tokens.weight"
    before = state.pop(name)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(shape.vocab, shape.hidden, generator=generator)
    table = wide.state_dict()[name]
    scale = float(before.std())
    for token, number in new.tokenizer.get_vocab().items():
        known = old.tokenizer.token_to_id(token)
        if known is not None:
            table[number] = before[known]
            continue
        parts = old.encode_text(new.tokenizer.decode([number])) or (0,)
        mean = before[list(parts)].mean(0)
        table[number] = 0.5 * mean + 0.5 * scale * noise[number]
    wide.load_state_dict(state | {name: table})
    return wide
