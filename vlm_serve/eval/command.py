"""`vlm-serve eval`: reads the questions, asks both sides, writes the report."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vlm_serve import child
from vlm_serve.config import EngineConfig
from vlm_serve.errors import ConfigError, InvalidRequestError
from vlm_serve.eval.choices import DECODING, DEFAULT_PARTS, THROUGH
from vlm_serve.eval.comparing import Comparison
from vlm_serve.eval.longbench import LongBenchOptions, longbench_parts
from vlm_serve.eval.longbench_data import find_data, read_items
from vlm_serve.eval.replies import Part
from vlm_serve.eval.report import Subject, check_output, make_report, status_of, write_report
from vlm_serve.eval.sides import opener_of, run_sides
from vlm_serve.eval.video import VideoOptions, video_parts
from vlm_serve.eval.video_data import read_videos
from vlm_serve.options import format_size, options_of


def evaluate(options: argparse.Namespace, model: str, config: EngineConfig) -> int:
    """Runs a benchmark; returns the exit status: 0, or as `report.status_of` says.

    Raises:
        ConfigError: options or files that cannot be used.
        CheckpointError, EngineClosedError, EvaluationError: see `run_sides` and `compare_lmms`.
    """
    check_output(options.output)
    if not config.enable_prefix_caching:
        raise ConfigError(
            "enable_prefix_caching is what eval compares: leave it out",
            param="enable_prefix_caching",
        )
    if options.benchmark == "lmms":
        return report_on(*_lmms(options, model, config), options.output)
    read = {"longbench": _longbench, "video": _video}[options.benchmark]
    try:
        title, data, parts = read(options)
    except InvalidRequestError as error:  # of sampling
        raise ConfigError(error.message, param=error.param) from None
    subject = Subject(title, model, data, _asked(options) | _shown(config))
    compared = run_sides(opener_of(model, config), parts, options.concurrency)
    return report_on(subject, compared, options.output)


def report_on(subject: Subject, compared: Iterable[Comparison], output: Path) -> int:
    """Writes the report and says the outcome; returns the exit status.

    Raises ConfigError if it cannot be written.
    """
    report = make_report(subject, list(compared))
    write_report(report, output)
    print(f"{report['verdict']} {output}")
    status = status_of(report)
    if status:
        _print_trouble(report)
    return status


def _lmms(
    options: argparse.Namespace, model: str, config: EngineConfig
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
    )
    asked = {"tasks": how.tasks, "max_frames": how.max_frames, "limit": how.limit or "none"}
    subject = Subject("lmms-eval", model, None, asked | _shown(config))
    return subject, compare_lmms(model, config, _changed(config), how)


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


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """How the questions are asked, as the report has it."""
    asked = {"decoding": ", ".join(_decoding(options)), "max_tokens": options.max_tokens}
    if options.benchmark == "longbench":
        asked["reasoning_tokens"] = options.reasoning_tokens
    if "seeded" in _decoding(options):
        asked |= {"temperature": options.temperature, "seed": options.seed}
    return asked | {"concurrency": options.concurrency}


def _changed(config: EngineConfig) -> dict[str, Any]:
    """The engine's options that are not as they are by themselves."""
    values = {each.name: getattr(config, each.name) for each in options_of(EngineConfig)}
    standard = EngineConfig()
    return {name: value for name, value in values.items() if value != getattr(standard, name)}


def _shown(config: EngineConfig) -> dict[str, Any]:
    """Those options as a reader wants them."""
    sizes = {each.name for each in options_of(EngineConfig) if each.kind == "size"}
    return {
        name: format_size(value) if name in sizes else value
        for name, value in _changed(config).items()
    }


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
