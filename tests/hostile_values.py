"""Values, texts and JSON that nobody would send who means well, made from a random generator."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from typing import Any

WORDS = ("word", "the", "{{ 7 * 7 }}", "<|im_end|>", "<|image_pad|>", "</think>", "<tool_call>")
RANGES = (
    (32, 126),
    (160, 0x2FF),
    (0x300, 0x36F),
    (0x4E00, 0x9FFF),
    (0xE000, 0xF8FF),
    (0x1F300, 0x1FAFF),
)
NUMBERS = (0, -1, 1, 2**31, 2**53, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e-9, 1e9, 1e308, -0.0)


def size(rng: random.Random, most: int) -> int:
    """From one to `most`; every order of magnitude is as likely as any other."""
    return int(most ** rng.random())


def text(rng: random.Random, most: int = 2_000_000) -> str:
    """A text of up to that many characters, mostly short."""
    length = size(rng, most if rng.random() < 0.2 else 2_000)
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice(string.printable) * length
    if kind == 1:
        return (rng.choice(WORDS) + " ") * (length // 5 + 1)
    if kind == 2:
        low, high = rng.choice(RANGES)
        return "".join(chr(rng.randint(low, high)) for _ in range(min(length, 20_000)))
    if kind == 3:
        return rng.choice(("\n", " ", "\t", "\u200b", "\u0301", "\x00", "\U0001f600")) * length
    if kind == 4:
        return " ".join(rng.choice(WORDS) for _ in range(min(length, 20_000)))
    if kind == 5:
        return rng.choice(("", " ", "\x00", "\ufeff", "null", "../../etc/passwd", "%s%n", "'; --"))
    return "".join(rng.choices(string.ascii_letters, k=min(length, 20_000)))


def nested(rng: random.Random, levels: int) -> Any:
    value: Any = rng.choice(NUMBERS)
    for _ in range(levels):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def value(rng: random.Random, most: int = 100_000) -> Any:
    """Anything at all."""
    kind = rng.randrange(10)
    if kind == 0:
        return rng.choice((None, True, False, [], {}, "", [[]], [{}], [None]))
    if kind in (1, 2):
        return rng.choice(NUMBERS)
    if kind == 3:
        return text(rng)
    if kind == 4:
        return nested(rng, size(rng, 80))
    count = size(rng, most if rng.random() < 0.2 else 100)
    if kind == 5:
        return [rng.choice(NUMBERS)] * count
    if kind == 6:
        return ["x"] * count
    if kind == 7:
        return {f"k{number}": rng.choice(NUMBERS) for number in range(count)}
    if kind == 8:
        return [{"type": rng.choice(("text", [], {}, None, "image_url", "x"))}] * count
    return [value(rng, 100) for _ in range(rng.randrange(5))]


def schema(rng: random.Random) -> Any:
    """A JSON schema, or something like one."""
    kind = rng.randrange(7)
    if kind == 0:
        return value(rng, 1000)
    if kind == 1:
        names = [f"p{number}" for number in range(size(rng, 300))]
        return {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    if kind == 2:
        return {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}
    if kind == 3:
        return {"type": "string", "pattern": rng.choice(("(a+)+$", "(" * 300, "[", "a{1,100000}"))}
    if kind == 4:
        inner: Any = {"type": "integer"}
        for _ in range(size(rng, 60)):
            inner = {"type": "array", "items": inner}
        return inner
    if kind == 5:
        return {"enum": [text(rng, 1000) for _ in range(size(rng, 300))]}
    return {"type": rng.choice(("object", "array", "x", [], {})), "minItems": 10**9}


def _deep(rng: random.Random) -> bytes:
    opening = rng.choice((b"[", b'{"a":', b'{"messages":[')) * size(rng, 1_000_000)
    return opening + b"1"


def _many(rng: random.Random) -> bytes:
    item = rng.choice((b"1", b'""', b"[]", b"{}", b'{"a":1}', b"null", b"-1e5", b'"x"'))
    field = rng.choice((b"prompt", b"messages", b"stop_token_ids", b"bad_words", b"tools", b"x"))
    return b'{"%s":[' % field + b",".join([item] * size(rng, 1_500_000)) + b"]}"


def _mixed(rng: random.Random) -> bytes:
    count = size(rng, 500_000)
    field = rng.choice((b"prompt", b"stop_token_ids", b"messages", b"allowed_token_ids"))
    return b'{"%s":[1,' % field + b",".join([b'"x",2'] * count) + b"]}"


def _keys(rng: random.Random) -> bytes:
    count = size(rng, 500_000)
    return b"{" + b",".join(b'"k%d":1' % number for number in range(count)) + b"}"


def _characters(rng: random.Random) -> bytes:
    inside = rng.choice(
        (b"\xed\xa0\x80", b"\\ud800", b"\xff", b"\xc3", b"\x00", b"\\u0000", b"\xe9")
    )
    field = rng.choice((b"prompt", b"model", b"bad_words", b"stop"))
    return b'{"%s":"x%s"}' % (field, inside)


def _encoded(rng: random.Random) -> bytes:
    plain = '{"prompt": "' + "x" * size(rng, 100_000) + '"}'
    return plain.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "utf-16-le", "cp037")))


def _broken(rng: random.Random) -> bytes:
    whole = json.dumps({"prompt": text(rng, 10_000), "max_tokens": 1}).encode()
    return rng.choice(
        (
            whole[: rng.randrange(len(whole))],
            whole + whole,
            whole + b"\x00",
            b"1" * size(rng, 1_000_000),
            *(b"", b"null", b"[]", b'{"a":NaN}', b'{"a":1e999}'),
        )
    )


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(size(rng, 1_000_000))


RAW: tuple[Callable[[random.Random], bytes], ...] = (
    _deep,
    _many,
    _mixed,
    _keys,
    _characters,
    _encoded,
    _broken,
    _noise,
)


def raw_json(rng: random.Random) -> bytes:
    """Bytes sent as JSON."""
    return rng.choice(RAW)(rng)
