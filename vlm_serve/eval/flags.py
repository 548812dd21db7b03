"""The arguments of `vlm-serve eval`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlm_serve.config import EngineConfig
from vlm_serve.eval.choices import DECODING, DEFAULT_PARTS, PARTS, THROUGH
from vlm_serve.flags import add_options, positive
from vlm_serve.options import options_of

Adder = Callable[[argparse.ArgumentParser], None]
_COMPARED = "enable_prefix_caching"


def add_eval_commands(
    commands: Any, run: Callable[[argparse.Namespace], int], model: Adder
) -> None:
    """`eval` with its benchmarks; `model` adds the arguments that name the model."""
    parser = commands.add_parser(
        "eval",
        help="compare answers with and without prefix caching",
        allow_abbrev=False,
    )
    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")

    longbench = benchmarks.add_parser(
        "longbench", help="LongBench v2: questions about long documents", allow_abbrev=False
    )
    longbench.add_argument(
        "--part",
        action="append",
        choices=PARTS,
        help=f"what is asked; may be given repeatedly (default: {', '.join(DEFAULT_PARTS)})",
    )
    longbench.add_argument(
        "--reasoning-tokens",
        type=positive,
        default=1024,
        metavar="N",
        help="longest reasoning of a first turn (default: 1024)",
    )
    told = "a JSON or JSON lines file in LongBench v2's form; hub fetches the published one"
    _finish(longbench, "longbench", run, model, ("FILE|hub", told), temperature=0.1)

    video = benchmarks.add_parser(
        "video", help="questions about videos, several of each", allow_abbrev=False
    )
    data = ("FILE", ".csv or .jsonl with video, question, answer and, if wanted, choices")
    _finish(video, "video", run, model, data, temperature=0.7)
    _add_lmms(benchmarks, run, model)


def _add_lmms(benchmarks: Any, run: Callable[[argparse.Namespace], int], model: Adder) -> None:
    lmms = benchmarks.add_parser(
        "lmms", help="tasks of lmms-eval, which is installed apart", allow_abbrev=False
    )
    lmms.set_defaults(run=run, benchmark="lmms")
    lmms.add_argument("--tasks", required=True, metavar="A,B", help="as for lmms-eval")
    lmms.add_argument(
        "--through",
        action="append",
        choices=THROUGH,
        help="how the model is asked; may be given repeatedly (default: both)",
    )
    lmms.add_argument("--include-path", type=Path, metavar="DIR", help="folder of further tasks")
    lmms.add_argument(
        "--lmms-eval",
        default="",
        metavar="COMMAND",
        help="what starts lmms-eval, where it is in another environment: its python with "
        "-m vlm_serve.eval.lmms_run (default: this python)",
    )
    lmms.add_argument(
        "--max-frames", type=positive, default=8, metavar="N", help="of a video (default: 8)"
    )
    lmms.add_argument(
        "--limit", type=positive, metavar="N", help="only so many samples of a task (default: all)"
    )
    lmms.add_argument(
        "--timeout",
        type=positive,
        default=3600,
        metavar="SECONDS",
        help="for each of lmms-eval's runs (default: 3600)",
    )
    _add_common(lmms, "lmms", model)


def _finish(
    parser: argparse.ArgumentParser,
    name: str,
    run: Callable[[argparse.Namespace], int],
    model: Adder,
    data: tuple[str, str],
    *,
    temperature: float,
) -> None:
    """What those take that ask the model themselves; `data`: what --data names, and its help."""
    parser.set_defaults(run=run, benchmark=name)
    parser.add_argument("--data", required=True, metavar=data[0], help=data[1])
    parser.add_argument(
        "--decoding",
        action="append",
        choices=DECODING,
        help="may be given repeatedly (default: both)",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=128, metavar="N", help="of an answer (default: 128)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="X",
        help=f"of seeded answers (default: {temperature})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of seeded answers (default: 0)")
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="only the first N questions (default: all)"
    )
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=1,
        metavar="N",
        help="documents or videos that are asked about side by side (default: 1)",
    )
    _add_common(parser, name, model)


def _add_common(parser: argparse.ArgumentParser, name: str, model: Adder) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(f"eval-{name}.html"),
        metavar="FILE",
        help=f"the report; the same as .json beside it (default: eval-{name}.html)",
    )
    model(parser)
    add_options(parser, [each for each in options_of(EngineConfig) if each.name != _COMPARED])
