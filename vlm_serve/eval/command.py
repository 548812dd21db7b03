"""`vlm-serve eval`: reads the questions, asks both sides, writes the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm_serve.config import EngineConfig
from vlm_serve.errors import ConfigError, InvalidRequestError
from vlm_serve.eval.longbench import DEFAULT_PARTS, LongBenchOptions, longbench_parts
from vlm_serve.eval.longbench_data import find_data, read_items
from vlm_serve.eval.replies import DECODING, Part
from vlm_serve.eval.report import Subject, check_output, make_report, status_of, write_report
from vlm_serve.eval.sides import Opener, opener_of, run_sides
from vlm_serve.eval.video import VideoOptions, video_parts
from vlm_serve.eval.video_data import read_videos
from vlm_serve.options import format_size, options_of


def evaluate(options: argparse.Namespace, model: str, config: EngineConfig) -> int:
    """Runs a benchmark; returns the exit status: 0, or as `report.status_of` says.

    Raises:
        ConfigError: options or files that cannot be used.
        CheckpointError, EngineClosedError: see `run_sides`.
    """
    check_output(options.output)
    read = {"longbench": _longbench, "video": _video}[options.benchmark]
    try:
        title, data, parts = read(options)
    except InvalidRequestError as error:  # of sampling
        raise ConfigError(error.message, param=error.param) from None
    asked = {"decoding": ", ".join(_decoding(options)), "max_tokens": options.max_tokens}
    if options.benchmark == "longbench":
        asked["reasoning_tokens"] = options.reasoning_tokens
    if "seeded" in _decoding(options):
        asked |= {"temperature": options.temperature, "seed": options.seed}
    asked |= {"concurrency": options.concurrency} | _changed(config)
    subject = Subject(title, model, data, asked)
    return compare_and_report(
        subject, parts, opener_of(model, config), options.output, options.concurrency
    )


def compare_and_report(
    subject: Subject, parts: Sequence[Part], open_side: Opener, output: Path, concurrency: int = 1
) -> int:
    """Asks both sides, writes the report and says the outcome; returns the exit status. Raises as
    `evaluate` does."""
    report = make_report(subject, run_sides(open_side, parts, concurrency))
    write_report(report, output)
    print(f"{report['verdict']} {output}")
    status: int = status_of(report)
    if status:
        _print_trouble(report)
    return status


def _longbench(options: argparse.Namespace) -> tuple[str, Path, list[Part]]:
    data = find_data(options.data)
    items = read_items(data, options.limit)
    how = LongBenchOptions(
        tuple(dict.fromkeys(options.part or DEFAULT_PARTS)),
        _decoding(options),
        options.max_tokens,
        options.reasoning_tokens,
        options.temperature,
        options.seed,
    )
    return "LongBench v2", data, list(longbench_parts(items, how))


def _video(options: argparse.Namespace) -> tuple[str, Path, list[Part]]:
    data = Path(options.data)
    items = read_videos(data, options.limit)
    how = VideoOptions(_decoding(options), options.max_tokens, options.temperature, options.seed)
    return "Video QA", data, list(video_parts(items, how))


def _decoding(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(dict.fromkeys(options.decoding or DECODING))


def _changed(config: EngineConfig) -> dict[str, Any]:
    """The engine's options that are not as they are by themselves, as a reader wants them."""
    found = {}
    for each in options_of(EngineConfig):
        value = getattr(config, each.name)
        if value != getattr(EngineConfig(), each.name):
            found[each.name] = format_size(value) if each.kind == "size" else value
    return found


def _print_trouble(report: dict[str, Any], most: int = 20) -> None:
    """The first of what differs or has failed, on standard error."""
    lines = []
    for part in report["parts"]:
        for each in part["failures"]:
            lines.append(f"{part['name']}, {each['item']}, {each['side']}: {each['error']}")
        for each in part["differences"]:
            pair = f"{each['cached']!r} with caching, {each['uncached']!r} without"
            lines.append(f"{part['name']}, {each['item']}, {each['what']}: {pair}")
    for line in lines[:most]:
        print(line, file=sys.stderr)
    if len(lines) > most:
        print(f"and {len(lines) - most} more", file=sys.stderr)
