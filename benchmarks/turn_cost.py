"""What a known conversation costs before and in the engine, as ratios in one run.

    python benchmarks/turn_cost.py [MODEL] [--turns 3 15 32] [--repeats 15]

Rows are lengths of one conversation. The columns are shares of one plain encoding of its text:
`known` is a conversation that was prepared before, with one new turn; `first` one of which nothing
is known; `as before` what every preparation did until texts were remembered: texts, pieces and
prompt were encoded whole, and the template was rendered twice. The last two columns are a hit in
the cache by messages, and a hit by token ids, as shares of the latter.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import machine

from vlm_serve import EngineConfig, Pipeline, SamplingParams
from vlm_serve.preprocess.identity.keys import PromptKeys
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.preprocess.text.rendering import (
    ChatRequest,
    TypedText,
    split_pieces,
    texts_of,
)

SENTENCE = "The river bends twice before it meets the old mill, and nobody remembers why. "
Messages = list[dict[str, Any]]


def conversation(turns: int, last: str) -> Messages:
    """Return so many turns of equal length, each with words of its own, and a last question."""
    said: Messages = []
    for turn in range(turns):
        for role, count in (("user", 20), ("assistant", 4)):
            text = "".join(f"{SENTENCE[:-2]} {turn}{'x' * at}. " for at in range(count))
            said.append({"role": role, "content": text[: len(SENTENCE) * count]})
    return [*said, {"role": "user", "content": last}]


def seconds(repeats: int, clock: Callable[[], float], *calls: Callable[[], object]) -> list[float]:
    """Return the best time of each call; they take turns, so that all meet the same machine."""
    best = [float("inf")] * len(calls)
    for _, (index, call) in itertools.product(range(repeats), enumerate(calls)):
        begin = clock()
        call()
        best[index] = min(best[index], clock() - begin)
    return best


def as_before(preprocessor: Preprocessor, messages: Messages, root: bytes) -> PromptKeys:
    """Do what a preparation of text did before anything was remembered."""
    tokenizer = preprocessor.tokenizer
    request = ChatRequest(read_conversation("chat", {"messages": messages}), preprocessor._template)
    tokenizer.check_length(texts_of(request.messages))
    special, pattern = tokenizer.special_tokens, tokenizer.special_pattern
    typed = TypedText([request.messages, request.tools, request.kwargs], tuple(special), pattern)
    pieces = tuple(split_pieces(request.render(typed), pattern))
    tokenizer.check_length(piece.text for piece in pieces if not piece.is_special)
    ids: list[int] = []
    for piece in pieces:
        plain = () if piece.is_special else tokenizer.encode_plain(typed.restore(piece.text))
        ids += [special[piece.text]] if piece.is_special else plain
    tuple(split_pieces(request.render_next_turn(typed), pattern))
    size, ends = preprocessor.block_size, tokenizer.end_of_turn_ids
    return PromptKeys(root, ids, block_size=size, end_of_turn_ids=ends)


def measure(pipe: Pipeline, turns: int, repeats: int) -> Sequence[object]:
    """Return a row of the table."""
    preprocessor, known = pipe.engine.preprocessor, pipe.engine.preprocessor.known_text
    messages = conversation(turns, "Well?")
    text = "".join(message["content"] for message in messages)
    params = SamplingParams(max_tokens=1, temperature=0)
    for _ in range(3):
        ids = list(pipe.chat(messages, params).prompt_token_ids)
        pipe.generate_many([ids], params)
    texts = (f"Well, {number}?" for number in itertools.count())
    questions = ({"role": "user", "content": text} for text in texts)

    def first() -> None:
        known.clear()
        preprocessor.prepare(messages)

    encoding, new, cold, before = seconds(
        repeats,
        time.thread_time,  # Preparation has one thread; others may use the machine meanwhile.
        lambda: preprocessor.tokenizer.encode_plain(text),
        lambda: preprocessor.prepare([*messages[:-1], next(questions)]),
        first,
        lambda: as_before(preprocessor, messages, bytes(32)),
    )
    preprocessor.prepare(messages)
    by_ids, by_messages = seconds(
        repeats,
        time.perf_counter,
        lambda: pipe.generate_many([ids], params),
        lambda: pipe.chat(messages, params),
    )
    shares = [f"{part / encoding:.2f}" for part in (new, cold, before)]
    return [len(ids), f"{1e3 * encoding:.1f}", *shares, f"{by_messages / by_ids:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--turns", nargs="+", type=int, default=[3, 15, 32])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    print(machine.describe(torch.get_num_threads()))
    print("tokens | one encoding, ms | known | first | as before | hit by messages / by ids")
    with Pipeline(args.model, EngineConfig(cache_memory="512MiB")) as pipe:
        for turns in args.turns:
            print(*measure(pipe, turns, args.repeats), sep=" | ")


if __name__ == "__main__":
    main()
