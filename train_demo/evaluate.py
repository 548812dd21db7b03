"""Measure the accuracy of the demo checkpoints by kind of question:
`python train_demo/evaluate.py demo demo-moe`.

Answers are greedy, through `vlm_serve.Pipeline`, about pictures and videos of held-out seeds, and
the output is reproducible. Photographs are those of scikit-image, if it is installed. `--compare`
repeats everything without prefix caching, and a part with transformers, and counts answers with any
different token. `--drafts` reports acceptance and speed-up of drafts by source.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from demo_cases import Case, image_cases, video_cases
from demo_drafts import print_drafts
from demo_reference import reference_tokens
from demo_schemas import SchemaCase, schema_cases
from demo_suites import (
    ToolCase,
    call_is_right,
    photograph_cases,
    talk_cases,
    tool_cases,
)

import vlm_serve
from vlm_serve import Pipeline, SamplingParams
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.output import Output
from vlm_serve.server.api.shared.sampling import ToolChoice, with_tools
from vlm_serve.structured_outputs import StructuredOutputs

# Concurrent requests, few enough for the videos of a batch to fit into memory.
BATCH = 16
MAX_TOKENS = 96
# Requests of --compare to transformers.
REFERENCES = 200
BUILT_IN = {"demo": "dense", "demo-moe": "moe"}


AnyCase = TypeVar("AnyCase")


def batched(cases: Iterable[AnyCase]) -> Iterator[list[AnyCase]]:
    iterator = iter(cases)
    while batch := list(islice(iterator, BATCH)):
        yield batch


def answers(pipe: Pipeline, cases: Iterable[Case]) -> Iterator[tuple[Case, str, list[int]]]:
    """Yield each case with the model's answer as text and tokens."""
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    for batch in batched(cases):
        outputs = pipe.chat_many([case.messages for case in batch], greedy)
        for case, output in zip(batch, outputs, strict=True):
            yield case, output.text, output.token_ids


def filled(pipe: Pipeline, cases: Iterable[SchemaCase]) -> Iterator[tuple[SchemaCase, Any]]:
    """Yield each case with the model's parsed JSON; None if the answer reached the limit."""
    for batch in batched(cases):
        wanted = [
            SamplingParams(
                temperature=0.0,
                max_tokens=2 * MAX_TOKENS,
                structured_outputs=StructuredOutputs(json=case.schema),
            )
            for case in batch
        ]
        outputs = pipe.chat_many([case.messages for case in batch], wanted)
        for case, output in zip(batch, outputs, strict=True):
            yield case, json.loads(output.text) if output.finish_reason == "stop" else None


def evaluate_schemas(model: str, count: int, seed: int, config: EngineConfig) -> None:
    """Print how often JSON of a schema ends, and how often its fields are right."""
    ended: dict[str, list[bool]] = defaultdict(list)
    right: dict[str, list[bool]] = defaultdict(list)
    with Pipeline(model, config) as pipe:
        for case, found in filled(pipe, schema_cases(count, seed)):
            ended[case.kind].append(found is not None)
            right[case.kind] += fields_right(case, found)
    print_accuracy("JSON that ends", ended)
    print_accuracy("its fields", {kind: hits for kind, hits in right.items() if hits})


def fields_right(case: SchemaCase, found: Any) -> list[bool]:
    """Return the correctness of each field that the picture determines; lists in any order."""
    values = {name: (found or {}).get(name) for name in case.known}
    return [_sorted(values[name]) == _sorted(value) for name, value in case.known.items()]


def _sorted(value: Any) -> Any:
    return sorted(map(json.dumps, value)) if isinstance(value, list) else value


def called(pipe: Pipeline, cases: Iterable[ToolCase]) -> Iterator[tuple[ToolCase, Output]]:
    """Yield each case with its answer."""
    for case in cases:
        schemas = {case.name: case.tools[0]["function"]["parameters"]}
        choice = ToolChoice.of("required" if case.forced else None, [case.name], None)
        form = with_tools(None, choice, schemas, "response_format", "qwen3_xml")
        params = SamplingParams(temperature=0.0, max_tokens=2 * MAX_TOKENS, structured_outputs=form)
        yield case, pipe.chat(case.messages, params, tools=case.tools)


def evaluate_clients(model: str, count: int, seed: int, config: EngineConfig, show: int) -> None:
    """Print the accuracy of greetings, photographs and tool calls."""
    with Pipeline(model, config) as pipe:
        for title, cases in (
            ("greetings", list(talk_cases())),
            ("photographs", list(photograph_cases(count // 2, seed))),
        ):
            right: dict[str, list[bool]] = defaultdict(list)
            for case, text, _ in answers(pipe, cases):
                right[case.kind].append(text == case.answer)
                if text != case.answer and show > 0:
                    show -= 1
                    print(f"    {case.messages[-1]['content']!r}: {text!r}, not {case.answer!r}")
            print_accuracy(title, right)
        calls: dict[str, list[bool]] = defaultdict(list)
        for each, output in called(pipe, tool_cases(count, seed)):
            calls[each.kind].append(call_is_right(each, output.tool_calls))
            if not calls[each.kind][-1] and show > 0:
                show -= 1
                print(f"    {each.name} {each.arguments}: {output.tool_calls or output.text}")
        print_accuracy("tool calls", calls)


def evaluate(
    model: str,
    images: int,
    videos: int,
    seed: int,
    config: EngineConfig,
    *,
    compare: bool,
    show: int,
) -> None:
    """Print the accuracy of one model."""
    cold = replace(config, enable_prefix_caching=False)
    uncached = Pipeline(model, cold) if compare else None
    different = 0
    print(f"{model}")
    with Pipeline(model, config) as pipe:
        for title, cases in (
            ("images", partial(image_cases, images, seed)),
            ("videos", partial(video_cases, videos, seed)),
        ):
            right: dict[str, list[bool]] = defaultdict(list)
            again = answers(uncached, cases()) if uncached is not None else None
            for case, text, tokens in answers(pipe, cases()):
                hit = text == case.answer
                right[case.kind].append(hit)
                if not hit and show > 0:
                    show -= 1
                    question = case.messages[-1]["content"][-1]["text"]
                    print(f"    {question!r}: {text!r}, not {case.answer!r}")
                if again is not None:
                    different += next(again)[2] != tokens
            print_accuracy(title, right)
    if uncached is not None:
        uncached.close()
        print(f"  {different} of {images + videos} answers differ without prefix caching")
        compare_with_transformers(model, images, videos, seed)


def directory(model: str) -> Path:
    """Return the directory of a built-in or any other checkpoint."""
    if model in BUILT_IN:
        return Path(vlm_serve.__file__).parent / "demo" / BUILT_IN[model]
    return Path(model)


def compare_with_transformers(model: str, images: int, videos: int, seed: int) -> None:
    """Ask transformers about every n-th case, 200 in all, of all media kinds."""
    checkpoint = directory(model)
    every = max(1, (images + videos) // REFERENCES)
    cases = [*islice(image_cases(images, seed), 0, None, every)]
    cases += islice(video_cases(videos, seed), 0, None, every)
    with Pipeline(model) as pipe:
        different = sum(
            tokens != reference_tokens(checkpoint, case, MAX_TOKENS)
            for case, _, tokens in answers(pipe, cases)
        )
    print(f"  {different} of {len(cases)} answers differ from those of transformers")


def print_accuracy(title: str, right: dict[str, list[bool]]) -> None:
    total = [hit for hits in right.values() for hit in hits]
    if not total:
        return
    print(f"  {title}: {sum(total) / len(total):.2%} of {len(total)}")
    for kind, hits in sorted(right.items()):
        print(f"    {kind:24s} {sum(hits) / len(hits):7.2%} of {len(hits)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="demo, demo-moe or a checkpoint directory")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--videos", type=int, default=1000)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--clients", type=int, default=200, help="tool calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="also uncached, and transformers")
    parser.add_argument("--drafts", type=int, default=0, help="questions to ask with drafts")
    parser.add_argument("--show", type=int, default=0, help="how many wrong answers to print")
    parser.add_argument("--quantization", choices=("int8", "int6", "int4"))
    parser.add_argument("--quantized-activations", choices=("auto", "none", "int8"), default="auto")
    args = parser.parse_args()
    config = EngineConfig(
        quantization=args.quantization, quantized_activations=args.quantized_activations
    )
    given = args.images, args.videos, args.seed, config
    for model in args.models:
        evaluate(model, *given, compare=args.compare, show=args.show)
        evaluate_schemas(model, args.schemas, args.seed, config)
        evaluate_clients(model, args.clients, args.seed, config, args.show)
        if args.drafts:
            print_drafts(directory(model), args.drafts, args.seed)


if __name__ == "__main__":
    main()
