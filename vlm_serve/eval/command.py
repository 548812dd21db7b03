"""`vlm-serve eval`: read the questions, ask both sides, write the report.

The sides are an engine with prefix caching and one without.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlm_serve.errors import ConfigError, EngineClosedError, InvalidRequestError, VlmServeError
from vlm_serve.eval.comparing import Comparison, compare
from vlm_serve.eval.flags import DECODING, DEFAULT_PARTS, THROUGH
from vlm_serve.eval.longbench import LongBenchOptions, longbench_parts
from vlm_serve.eval.longbench_data import find_data, read_items
from vlm_serve.eval.replies import (
    AnswerOptions,
    AnswerRun,
    BenchmarkPart,
    Case,
    Reply,
    TokenCounts,
)
from vlm_serve.eval.report import Subject, check_output, make_report, status_of, write_report
from vlm_serve.eval.video import read_videos, video_parts
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import format_size, options_of
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.system import child


def evaluate(
    options: argparse.Namespace, model: str, config: EngineConfig, reasoning_parser: str = "auto"
) -> int:
    """Run a benchmark and return the exit status, see `report.status_of`.

    Args:
        reasoning_parser: how thoughts are split off; answers are judged without them.

    Raises:
        ConfigError: invalid options or files.
        CheckpointError, EngineClosedError, EvaluationError: see `run_sides` and `compare_lmms`.
    """
    check_output(options.output)
    if not config.enable_prefix_caching:
        raise ConfigError(
            "enable_prefix_caching is what eval compares: leave it out",
            param="enable_prefix_caching",
        )
    if options.benchmark == "lmms":
        return report_on(*_lmms(options, model, config, reasoning_parser), options.output)
    read = {"longbench": _longbench, "video": _video}[options.benchmark]
    try:
        title, data, parts = read(options)
    except InvalidRequestError as error:  # Invalid sampling options.
        raise ConfigError(error.message, param=error.param) from None
    subject = Subject(title, model, data, _asked(options) | _shown(config))

    def opened(caching: bool) -> Pipeline:
        side = replace(config, enable_prefix_caching=caching)
        return Pipeline(model, side, lora=options.lora, reasoning_parser=reasoning_parser)

    compared = run_sides(opened, parts, options.concurrency)
    return report_on(subject, compared, options.output)


def report_on(subject: Subject, compared: Iterable[Comparison], output: Path) -> int:
    """Write the report, print the verdict and return the exit status.

    Raises ConfigError if the report cannot be written.
    """
    report = make_report(subject, list(compared))
    write_report(report, output)
    print(f"{report['verdict']} {output}")
    status = status_of(report)
    if status:
        _print_trouble(report)
    return status


def _lmms(
    options: argparse.Namespace, model: str, config: EngineConfig, reasoning_parser: str
) -> tuple[Subject, Iterator[Comparison]]:
    from vlm_serve.eval.lmms import LmmsOptions, compare_lmms

    how = LmmsOptions(
        tuple(shlex.split(options.lmms_eval) or child.command("vlm_serve.eval.lmms_run")),
        options.tasks,
        tuple(dict.fromkeys(options.through or THROUGH)),
        options.include_path,
        options.limit,
        options.max_frames,
        options.timeout,
        reasoning_parser,
    )
    asked = {"tasks": how.tasks, "max_frames": how.max_frames, "limit": how.limit or "none"}
    subject = Subject("lmms-eval", model, None, asked | _shown(config))
    return subject, compare_lmms(model, config, _changed(config), how)


def _longbench(options: argparse.Namespace) -> tuple[str, Path, list[BenchmarkPart]]:
    data = find_data(options.data)
    items = read_items(data, options.limit)
    parts = tuple(dict.fromkeys(options.part or DEFAULT_PARTS))
    how = LongBenchOptions(*_answers(options), parts, options.reasoning_tokens)
    return "LongBench v2", data, list(longbench_parts(items, how))


def _video(options: argparse.Namespace) -> tuple[str, Path, list[BenchmarkPart]]:
    data = Path(options.data)
    items = read_videos(data, options.limit)
    return "Video QA", data, list(video_parts(items, AnswerOptions(*_answers(options))))


def _answers(options: argparse.Namespace) -> tuple[tuple[str, ...], int, float, int]:
    return _decoding(options), options.max_tokens, options.temperature, options.seed


def _decoding(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(dict.fromkeys(options.decoding or DECODING))


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the questions for the report."""
    asked = {"decoding": ", ".join(_decoding(options)), "max_tokens": options.max_tokens}
    if options.benchmark == "longbench":
        asked["reasoning_tokens"] = options.reasoning_tokens
    if "seeded" in _decoding(options):
        asked |= {"temperature": options.temperature, "seed": options.seed}
    return asked | {"concurrency": options.concurrency}


def _changed(config: EngineConfig) -> dict[str, Any]:
    """Return the engine's options that differ from their defaults."""
    values = {option.name: getattr(config, option.name) for option in options_of(EngineConfig)}
    standard = EngineConfig()
    return {name: value for name, value in values.items() if value != getattr(standard, name)}


def _shown(config: EngineConfig) -> dict[str, Any]:
    """Return the changed options, sizes in readable units."""
    sizes = {option.name for option in options_of(EngineConfig) if option.kind == "size"}
    return {
        name: format_size(value) if name in sizes else value
        for name, value in _changed(config).items()
    }


def _print_trouble(report: dict[str, Any], most: int = 20) -> None:
    """Print the first failures and differences to standard error."""
    lines = []
    for part in report["parts"]:
        for failure in part["failures"]:
            lines.append(
                f"{part['name']}, {failure['item']}, {failure['side']}: {failure['error']}"
            )
        for difference in part["differences"]:
            pair = f"{difference['cached']!r} with caching, {difference['uncached']!r} without"
            lines.append(f"{part['name']}, {difference['item']}, {difference['what']}: {pair}")
    for line in lines[:most]:
        print(line, file=sys.stderr)
    if len(lines) > most:
        print(f"and {len(lines) - most} more", file=sys.stderr)


Opener = Callable[[bool], AbstractContextManager[Pipeline]]
"""Opens a pipeline with prefix caching (True) or without (False)."""


def run_sides(
    open_side: Opener, parts: Sequence[BenchmarkPart], concurrency: int = 1
) -> list[Comparison]:
    """Ask both sides all parts, the side with caching first, with one engine at a time.

    Args:
        concurrency: groups of a part to ask concurrently.

    Raises:
        CheckpointError, ConfigError: an engine cannot be built.
        EngineClosedError: an engine has stopped.
    """
    sides: list[list[AnswerRun]] = []
    for caching in (True, False):
        with open_side(caching) as pipe:
            how = "with caching" if caching else "without"
            runs = []
            for part in parts:
                runs.append(run_part(pipe, part, concurrency))
                done = f"{part.name}, {how}: {len(runs[-1].replies)} items"
                print(f"{done} in {runs[-1].seconds:.1f} s", file=sys.stderr, flush=True)
            sides.append(runs)
    return [compare(part.name, part.note, *runs) for part, *runs in zip(parts, *sides, strict=True)]


def run_part(pipe: Pipeline, part: BenchmarkPart, concurrency: int = 1) -> AnswerRun:
    """Ask all questions of a part, starting with an empty cache. Raises like `run_sides`."""
    pipe.engine.flush()
    begin = time.perf_counter()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="vlm-serve-eval") as pool:
        groups = pool.map(lambda group: [_ask(pipe, case) for case in group], part.groups)
        replies = tuple(reply for group in groups for reply in group)
    seconds = time.perf_counter() - begin
    return AnswerRun(replies, seconds, TokenCounts.sum(reply.tokens for reply in replies))


def _ask(pipe: Pipeline, case: Case) -> Reply:
    try:
        return case.ask(pipe)
    except EngineClosedError:  # No later request could succeed.
        raise
    except VlmServeError as error:
        return Reply(case.item, error=error.message)
