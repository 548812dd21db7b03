"""Random answers that a grammar allows, and what `jsonschema` says about them."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import numpy as np

from vlm_serve.grammar.state import Grammar, GrammarState
from vlm_serve.preprocess.text.tokenizer import Tokenizer

WIDTH = 768
STEPS = 300


def walk(
    grammar: Grammar,
    tokenizer: Tokenizer,
    choices: random.Random,
    *,
    rolling: bool = False,
    closings: tuple[bytes, ...] = (b'"', b"}", b"]"),
    ending: bytes = b"",
) -> str | None:
    """Return a random answer that the grammar allows; None: it has not ended.

    Args:
        rolling: try other tokens ahead of every step, as drafts do.
        closings: what a token begins with that ends a value; it is preferred more and more.
        ending: a longer text that ends a value.
    """
    state = GrammarState(grammar, tokenizer.token_bytes, WIDTH)
    answer = b""
    for step in range(STEPS):
        allowed = tokens(state)
        if rolling:
            with state.ahead():
                ahead = allowed
                for _ in range(3):
                    state.accept(choices.choice(ahead))
                    if state.finished:
                        break
                    ahead = tokens(state)
            assert tokens(state) == allowed
        ends = [token for token in allowed if token in tokenizer.eos_ids]
        others = [token for token in allowed if token not in tokenizer.eos_ids]
        closing = [each for each in others if tokenizer.token_bytes(each).startswith(closings)]
        closing = [
            each for each in others if continues(answer, tokenizer.token_bytes(each), ending)
        ] or closing
        if ends and (not others or choices.random() < 0.6):
            state.accept(ends[0])
            assert state.finished
            return answer.decode()
        hurry = min(0.9, 0.3 + step / 100)
        token = choices.choice(closing if closing and choices.random() < hurry else others)
        state.accept(token)
        assert not state.finished
        answer += tokenizer.token_bytes(token)
    return None


def continues(answer: bytes, text: bytes, ending: bytes) -> bool:
    """Return True if the text is the next part of an ending that has begun."""
    begun = [ending[:size] for size in range(1, len(ending))]
    started = [each for each in begun if answer.endswith(each)]
    return bool(started) and ending[len(started[-1]) :].startswith(text)


def tokens(state: GrammarState) -> list[int]:
    mask = state.allowed()
    assert mask is not None, f"over a limit: {state.over_limit}, finished: {state.finished}"
    found = [int(each) for each in np.flatnonzero(np.unpackbits(mask, bitorder="little")[:WIDTH])]
    assert found, "nothing may follow"
    return found


def fits(schema: Any, value: Any) -> bool:
    """Return True if `jsonschema` accepts the value, nulls and draft 4's forms aside."""
    plain = modern(schema)
    kind = jsonschema.validators.validator_for(plain, jsonschema.Draft202012Validator)
    if "draft-0" in str(plain.get("$schema")):
        plain = {name: each for name, each in plain.items() if name != "$schema"}
        kind = jsonschema.Draft202012Validator
    try:
        return bool(kind(plain, format_checker=kind.FORMAT_CHECKER).is_valid(value))
    except RecursionError:  # jsonschema follows a definition that is only itself
        return True


def modern(node: Any) -> Any:
    if isinstance(node, list):
        return [modern(each) for each in node]
    if not isinstance(node, dict):
        return node
    out = {
        name: each if name in ("const", "enum", "default", "examples") else modern(each)
        for name, each in node.items() if each is not None or name == "const"
    }  # fmt: skip
    if isinstance(out.get("items"), list):
        out["prefixItems"] = out.pop("items")
        if "additionalItems" in out:
            out["items"] = out.pop("additionalItems")
    if isinstance(out.get("exclusiveMinimum"), bool) and out.pop("exclusiveMinimum"):
        out["exclusiveMinimum"] = out.pop("minimum")
    if "$id" in out:  # jsonschema resolves names of its own against URLs only
        out["$id"] = "urn:" + out["$id"]
    if "$ref" in out and not out["$ref"].startswith("#"):
        out["$ref"] = "urn:" + out["$ref"]
    return out
