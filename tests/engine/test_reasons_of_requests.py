"""The examples of docs/performance.md have the reason under which they stand there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm_serve import EngineConfig, Output, Pipeline, SamplingParams

MEDIA = Path(__file__).resolve().parents[2] / "examples" / "media"
SHORT = SamplingParams(temperature=0.0, max_tokens=2)
LONG = "Here are the rules of the house, which are long and do not change from day to day. " * 4


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline("demo") as pipe:
        yield pipe


def ask(pipe: Pipeline, *content: Any, system: str = LONG, **options: Any) -> Output:
    """A system prompt, then media and texts of one user turn."""
    parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": parts},
    ]
    return pipe.chat(messages, SHORT, **options)


def reason(output: Output) -> str:
    assert output.cache_report is not None
    return output.cache_report.reason


def picture(name: str) -> dict[str, str]:
    return {"type": "image", "image": str(MEDIA / f"{name}.png")}


def test_a_clock_at_the_beginning_leaves_nothing_to_reuse(pipe: Pipeline) -> None:
    for second in (45, 46):
        output = ask(pipe, "Who drew this?", system=f"It is 12:03:{second}. {LONG}")
    assert (reason(output), output.usage.cached_tokens) == ("cold", 0)


def test_a_clock_at_the_end_leaves_all_before_it(pipe: Pipeline) -> None:
    for second in (45, 46):
        output = ask(pipe, f"Who drew this? It is 12:03:{second}.")
    assert output.usage.cached_tokens > output.usage.prompt_tokens * 3 // 4


def test_the_same_request_once_more_is_full(pipe: Pipeline) -> None:
    ask(pipe, picture("star"), "Where is the star?")
    assert reason(ask(pipe, picture("star"), "Where is the star?")) == "full"


def test_written_tokens_are_those_that_the_next_request_hits(pipe: Pipeline) -> None:
    tokens = list(range(30, 150))
    first, short = pipe.generate(tokens, SHORT), pipe.generate(tokens[:3], SHORT)
    assert first.usage.written_tokens == 112 and short.usage.written_tokens == 0
    longer = [*tokens, *range(60)]
    again = pipe.generate(longer, SHORT).usage
    assert again.cached_tokens == 112 and again.written_tokens == 176 - 112
    assert pipe.generate(longer, SHORT).usage.written_tokens == 0


def test_another_question_about_a_picture_reuses_the_picture(pipe: Pipeline) -> None:
    first = ask(pipe, picture("shapes"), "What color is the star?")
    output = ask(pipe, picture("shapes"), "Is there a yellow square?")
    report = output.cache_report
    assert first.cache_report is not None and report is not None
    assert (reason(output), report.media_encoded) == ("unseen", 0)
    media_end = max(place.offset + place.length for place in report.media)
    assert output.usage.cached_tokens >= media_end


def test_another_picture_with_the_same_text_before_it(pipe: Pipeline) -> None:
    ask(pipe, picture("star"), "What is on this page?")
    output = ask(pipe, picture("heart"), "What is on this page?")
    assert reason(output) == "media_changed"
    assert output.usage.cached_tokens > output.usage.prompt_tokens // 2


def test_two_prompts_alike_up_to_the_middle_of_a_message(pipe: Pipeline) -> None:
    """The second one leaves a snapshot there, the third one hits."""
    story = "A long tale of which nobody knows the end, told again and again by the fire. " * 6
    seen = [ask(pipe, story + end) for end in ("Then rain.", "Now sun!", "But snow?")]
    assert reason(seen[1]) == "no_snapshot"
    assert seen[1].cache_report is not None
    assert seen[1].cache_report.kv_boundary > seen[1].cache_report.state_boundary
    assert seen[2].usage.cached_tokens > seen[1].usage.cached_tokens


def test_what_another_tenant_has_asked(pipe: Pipeline) -> None:
    ask(pipe, "Who drew this?", cache_salt="one")
    assert reason(ask(pipe, "Who drew this?", cache_salt="two")) == "salt"
    assert reason(ask(pipe, "Who drew this?", cache_salt="one")) == "full"


def test_a_prompt_that_is_too_short(pipe: Pipeline) -> None:
    assert reason(pipe.generate([5, 6], SHORT)) == "below_granularity"


def test_an_answered_prompt_whose_log_probabilities_are_wanted(pipe: Pipeline) -> None:
    tokens = list(range(20, 120))
    scored = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    pipe.generate(tokens, SHORT)
    first, again = (pipe.generate(tokens, scored) for _ in range(2))
    assert (reason(first), first.usage.cached_tokens) == ("prompt_logprobs", 0)
    assert again.usage.cached_tokens == 80
    assert again.cache_report is not None and again.cache_report.logprobs_reused == 95


def test_a_server_without_the_cache() -> None:
    with Pipeline("demo", EngineConfig(enable_prefix_caching=False)) as pipe:
        outputs = [ask(pipe, "Who drew this?") for _ in range(2)]
    assert [reason(output) for output in outputs] == ["disabled"] * 2
    assert not any(output.usage.written_tokens for output in outputs)


def test_a_cache_that_is_too_small_for_both() -> None:
    """The conversation that went on later has to be computed again: some of its KV is gone."""
    config = EngineConfig(compute_dtype="float32", cache_memory="5MiB", max_model_len=2048)
    with Pipeline("demo", config) as pipe:
        ask(pipe, "Who drew this?")
        for number in range(20):
            ask(pipe, f"{number}", system=f"{number} {LONG}")
        assert reason(ask(pipe, "Who drew this?")) in {"kv_evicted", "snapshot_evicted"}
