"""Arguments of `vlm-serve bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import options_of
from vlm_serve.options.flags import add_options, positive


def add_bench_command(
    commands: Any,
    run: Callable[[argparse.Namespace], int],
    model: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add `bench`; `model` adds the arguments for the model."""
    bench = commands.add_parser(
        "bench",
        help="measure an endpoint as its client sees it, beside a peer if one is named",
        allow_abbrev=False,
    )
    bench.set_defaults(run=run)
    bench.add_argument(
        "--base-url",
        metavar="URL",
        help="the endpoint, any that speaks OpenAI's API (default: a server that is started for "
        "MODEL and ends afterwards)",
    )
    bench.add_argument("--api-key", metavar="KEY", help="of the endpoint")
    bench.add_argument("--peer", metavar="URL", help="another endpoint, asked in turns")
    bench.add_argument(
        "--peer-model", metavar="NAME", help="its model (default: the first that it lists)"
    )
    bench.add_argument("--peer-api-key", metavar="KEY", help="of the peer")
    bench.add_argument(
        "--prompt-tokens",
        type=positive,
        default=2048,
        metavar="N",
        help="about as many tokens in a text prompt (default: 2048)",
    )
    bench.add_argument(
        "--answer-tokens",
        type=positive,
        default=128,
        metavar="N",
        help="tokens of an answer that shows the pace of decoding (default: 128)",
    )
    bench.add_argument(
        "--rounds", type=positive, default=5, metavar="N", help="at most (default: 5)"
    )
    bench.add_argument(
        "--seconds",
        type=positive,
        default=60,
        metavar="N",
        help="no round but the first begins after this time (default: 60)",
    )
    bench.add_argument("--json", action="store_true", help="print JSON and nothing else")
    model(bench)
    add_options(bench, options_of(EngineConfig))
