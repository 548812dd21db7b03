"""Texts in the real vocabularies have the ids of the published ranks, and those of transformers."""

from __future__ import annotations

import re
from pathlib import Path

import oracle
import published_vocabulary
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from vlm_serve.preprocess.text.family import QWEN2, QWEN3_5
from vlm_serve.preprocess.text.tokenizer import Tokenizer

FAMILIES = {"qwen3.5": QWEN3_5, "qwen2": QWEN2}
TEXTS = [
    "Hello, world! It's 2026, isn't it?\n\n  Indented\tand trailing   ",
    "def f(x):\n    return {'a': [1, 2.5e-3]}  # done\r\n",
    "Grüße aus Köln — 東京へようこそ。 Здравствуй, мир! مرحبا بالعالم",
    "ที่ตั้ง क्या यह हिन्दी है? 한국어 문장입니다 📷👩‍👩‍👧",
    "3 33 333 3333 33333 3.14159 1,000,000",
    "<|im_start|>user\nhi<|im_end|>\n<|vision_start|><|image_pad|><|vision_end|>",
    "e\u0301 and é; ﬁ; \u00a0; \u200b; '''''' ```` !!!!??",
    "SELECT * FROM t WHERE x >= 10 AND name LIKE '%ab_c%';",
]


@pytest.fixture(scope="module", params=FAMILIES)
def vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("vocabulary")
    published_vocabulary.write_vocabulary(path, request.param)
    # transformers splits words by the model's type.
    kind = {"qwen3.5": "qwen3_5", "qwen2": "qwen3"}[request.param]
    published_vocabulary.write(path / "config.json", {"model_type": kind})
    return request.param, path


def test_sizes_are_the_published_ones(vocabulary: tuple[str, Path]) -> None:
    name, path = vocabulary
    tokenizer = Tokenizer(path, FAMILIES[name])
    count, end = {"qwen3.5": (248077, 248046), "qwen2": (151669, 151645)}[name]
    assert (tokenizer.vocab_size, tokenizer.token_to_id("<|im_end|>")) == (count, end)
    assert tokenizer.eos_ids == tokenizer.end_of_turn_ids == {end}
    think = tokenizer.token_to_id("<think>")
    assert think is not None and not tokenizer.is_special(think)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_ranks_and_of_transformers(
    vocabulary: tuple[str, Path], text: str
) -> None:
    name, path = vocabulary
    tokenizer = Tokenizer(path, FAMILIES[name])
    ids = tokenizer.encode(text)
    known = published_vocabulary.ranks(name)
    expected: list[int] = []
    special = published_vocabulary.added_tokens(name)
    words = pre_tokenizers.Split(Regex(published_vocabulary.SPLITS[name]), behavior="isolated")
    for piece in re.split("(" + "|".join(map(re.escape, special)) + ")", text):
        if piece in special:
            expected.append(special[piece])
            continue
        normal = normalizers.NFC().normalize_str(piece)
        for word, _ in words.pre_tokenize_str(normal):
            parts = published_vocabulary.split_by_ranks(word.encode(), known)
            expected += [known[part] for part in parts]
    assert ids == expected
    assert ids == oracle.tokenizer(path)(text)["input_ids"]
