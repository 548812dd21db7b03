"""The command line. Each command imports its slow modules itself."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from vlm_serve.commands.completion import add_completion, complete_if_asked, script
from vlm_serve.commands.config_file import ALL_OPTIONS, DEMO_MODEL, read_config_file
from vlm_serve.commands.help_examples import add_examples
from vlm_serve.commands.long_parts import say_what_takes_long
from vlm_serve.deploy.options import DeployConfig
from vlm_serve.errors import ConfigError, VlmServeError
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import Option, check_environment, from_environment, options_of
from vlm_serve.options.flags import Parser, add_options, positive
from vlm_serve.server.config import SPLITTING, ServerConfig
from vlm_serve.system.process_limits import check_process_limits, memory_sentence
from vlm_serve.system.version import __version__

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the process's exit status.

    0: success, 1: failure, 2: invalid options, 3: some requests of a batch or an evaluation failed,
    4: answers of an evaluation differ, 130: Ctrl-C, 141: nobody reads the output any more.
    """
    parser = build_parser()
    complete_if_asked(parser)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given or ["--help"])
    try:
        if options.run in (run_serve, run_deploy, run_batch, run_video_qa, run_eval, run_chat):
            check_process_limits()
            if getattr(options, "base_url", None) is None:
                say_what_takes_long(logs=options.run in (run_serve, run_deploy))
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read the output has enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ConfigError as error:
        print(f"vlm-serve: {error.message}", file=sys.stderr)
        return 2
    except VlmServeError as error:
        print(f"vlm-serve: {error.message}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"vlm-serve: {memory_sentence(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if options.run in (run_batch, run_video_qa):
            print("vlm-serve: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return status


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; its result's `run` is the command's function."""
    from vlm_serve.eval.flags import add_eval_commands

    parser = Parser(
        prog="vlm-serve",
        description="Serves hybrid vision-language models and reuses what it has computed.",
        allow_abbrev=True,
    )
    parser.add_argument("--version", action="version", version=f"vlm-serve {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over HTTP")
    serve.set_defaults(run=run_serve)
    _add_model(serve)
    _add_configs(serve, ServerConfig, EngineConfig)

    deploy = commands.add_parser("deploy", help="serve a model with several engines, on Ray Serve")
    deploy.set_defaults(run=run_deploy)
    _add_model(deploy)
    _add_configs(deploy, DeployConfig, ServerConfig, EngineConfig)

    plan = commands.add_parser("plan", help="show what fits into the cache memory, from a config")
    plan.set_defaults(run=run_plan)
    _add_model(plan, also="; or a config.json")
    plan.add_argument("--json", action="store_true", help="print JSON and nothing else")
    plan.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="free memory of a GPU that is not here, such as 80GiB, with --device cuda",
    )
    # The server's options have no effect, but a `serve` command line stays valid for `plan`.
    _add_configs(plan, ServerConfig, EngineConfig)

    models = commands.add_parser(
        "models", help="list the models that can be served, and what each gets"
    )
    models.set_defaults(run=run_models)
    models.add_argument("--json", action="store_true", help="print JSON and nothing else")

    doctor = commands.add_parser(
        "doctor", help="say what this machine has, and what would compute here and why"
    )
    doctor.set_defaults(run=run_doctor)
    doctor.add_argument("--json", action="store_true", help="print JSON and nothing else")

    add_batch_commands(commands)
    add_eval_commands(commands, run_eval, _add_model)

    chat = commands.add_parser("chat", help="talk to a model, or answer one question and exit")
    chat.set_defaults(run=run_chat, take_late=_take_late_question)
    _add_model(chat)
    chat.add_argument(
        "question",
        nargs="?",
        help="what to ask; -: standard input (default: the lines of a conversation)",
    )
    chat.add_argument(
        "--image", action="append", default=[], metavar="FILE|URL", help="may be given repeatedly"
    )
    chat.add_argument(
        "--video", action="append", default=[], metavar="FILE|URL", help="may be given repeatedly"
    )
    chat.add_argument(
        "--base-url",
        metavar="URL",
        help="talk to a running server that speaks OpenAI's API; MODEL is then a name there",
    )
    chat.add_argument(
        "--api-key", metavar="KEY", help="of that server (default: the variable OPENAI_API_KEY)"
    )
    chat.add_argument(
        "--max-tokens", type=int, help="longest answer (default: as long as the context allows)"
    )
    chat.add_argument(
        "--temperature", type=float, default=None, help="0 is greedy (default: the checkpoint's)"
    )
    chat.add_argument("--lora", metavar="NAME", help="answer with this one of --lora-modules")
    chat.add_argument("--report", action="store_true", help="also print what the cache did")
    chat.add_argument(
        "--show-reasoning",
        action=argparse.BooleanOptionalAction,
        help="print the thought too, to standard error (default: if both outputs are terminals)",
    )
    add_options(chat, SPLITTING)
    _add_configs(chat, EngineConfig)

    add_completion(commands).set_defaults(run=run_completion)
    add_examples(parser)
    return parser


def _take_late_question(options: argparse.Namespace, unknown: list[str]) -> list[str]:
    """Tell the model of a `chat` from its question.

    argparse does not see a word behind the flags: in `chat MODEL --image FILE QUESTION` it finds no
    question. It takes the only word for the model, which it is if it has the form of one and no
    flag names another.

    Returns:
        What is still unknown.
    """
    from vlm_serve.commands.chat import is_model

    words = [word for word in unknown if not word.startswith("-")]
    if options.question is None and len(words) == 1 and words[0] == unknown[-1]:
        options.question, unknown = words[0], unknown[:-1]
        return unknown
    given = options.model is not None and options.question is None and options.base_url is None
    if given and (options.model_flag or not is_model(options.model)):
        options.model, options.question = None, options.model
    return unknown


def add_batch_commands(commands: Any) -> None:
    """Add run-batch and video-qa: they answer files of requests without a server."""
    batch = commands.add_parser(
        "run-batch", help="answer a file of requests in OpenAI's batch form"
    )
    batch.set_defaults(run=run_batch)
    _add_files(batch, "JSON lines {custom_id, method, url, body}", "JSON lines, one per request")
    batch.add_argument(
        "--ordered",
        action="store_true",
        help="write the output in the input's order, when all is done",
    )
    _add_batch_options(batch)

    video = commands.add_parser("video-qa", help="answer questions about many videos")
    video.set_defaults(run=run_video_qa)
    _add_files(
        video, "folder of videos, or .csv or .jsonl with video and question", ".jsonl or .csv"
    )
    video.add_argument(
        "--question",
        action="append",
        default=[],
        metavar="TEXT",
        help="asked about every video; may be given repeatedly",
    )
    video.add_argument(
        "--choices",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="every answer is one of these texts, with probabilities",
    )
    video.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: 256)")
    video.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    _add_batch_options(video)


def _add_files(parser: argparse.ArgumentParser, source: str, output: str) -> None:
    parser.add_argument(
        "-i", "--input", "--input-file", required=True, type=Path, metavar="PATH", help=source
    )
    parser.add_argument(
        "-o",
        "--output",
        "--output-file",
        required=True,
        type=Path,
        metavar="FILE",
        help=f"{output}; what an earlier run has written there is not done again",
    )


def _add_batch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=None, help=f"as for serve (default: {DEMO_MODEL})")
    parser.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        help="requests that are open at a time (default: twice max_num_seqs)",
    )
    _add_config_file(parser)
    _add_configs(parser, ServerConfig, EngineConfig)


def _add_model(parser: argparse.ArgumentParser, also: str = "") -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=None,
        metavar="MODEL",
        help="checkpoint directory, GGUF file, hub id, ollama:NAME, or a built-in model"
        f"{also} (default: {DEMO_MODEL})",
    )
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as a flag")
    _add_config_file(parser)


def _add_configs(parser: argparse.ArgumentParser, *configs: type[Any]) -> None:
    for config in configs:
        add_options(parser, options_of(config))


def _add_config_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of options; flags and VLM_SERVE_* environment variables win over it",
    )


def collect(
    options: Sequence[Option],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, Any],
) -> dict[str, Any]:
    """Merge the given values: flags win over the environment, the environment over the file."""
    names = {item.name for item in options}
    values = {name: value for name, value in file.items() if name in names}
    values |= from_environment(options, environment)
    return values | {name: value for name, value in flags.items() if name in names}


def _config_of(kind: type[T], options: argparse.Namespace, file: Mapping[str, Any]) -> T:
    """Make a config of its options."""
    return kind(**collect(options_of(kind), vars(options), os.environ, file))


def _file_and_engine(options: argparse.Namespace) -> tuple[dict[str, Any], EngineConfig]:
    """Return what the config file says, and the engine's options."""
    file = read_config_file(options.config)
    check_environment(ALL_OPTIONS, os.environ)
    return file, _config_of(EngineConfig, options, file)


def _model_and_configs(options: argparse.Namespace) -> tuple[str, EngineConfig, ServerConfig]:
    file, engine_config = _file_and_engine(options)
    server_config = _config_of(ServerConfig, options, file)
    if server_config.allow_runtime_lora:
        engine_config = replace(engine_config, reserve_loras=True)
    return _model(options, file), engine_config, server_config


def _model(options: argparse.Namespace, file: Mapping[str, Any]) -> str:
    """Return the model to serve. Raises ConfigError if the command line names two."""
    flag = getattr(options, "model_flag", None)
    if flag and options.model and flag != options.model:
        raise ConfigError(f"model is both {options.model!r} and {flag!r}", param="model")
    named = options.model or flag or os.environ.get("VLM_SERVE_MODEL") or file.get("model")
    return str(named or DEMO_MODEL)


def run_serve(options: argparse.Namespace) -> int:
    configured = _model_and_configs(options)
    from vlm_serve.batch.api.routes import BatchRoutes
    from vlm_serve.server.main import serve

    return serve(*configured, mounts=(BatchRoutes,))


def run_deploy(options: argparse.Namespace) -> int:
    configured = _model_and_configs(options)
    deployment = _config_of(DeployConfig, options, read_config_file(options.config))
    from vlm_serve.deploy.main import deploy

    return deploy(*configured, deployment)


def run_batch(options: argparse.Namespace) -> int:
    configured = _model_and_configs(options)
    from vlm_serve.batch import run_batch

    return run_batch.run(
        options.input,
        options.output,
        *configured,
        in_order=options.ordered,
        concurrency=options.concurrency,
    )


def run_video_qa(options: argparse.Namespace) -> int:
    configured = _model_and_configs(options)
    from vlm_serve.batch import video_qa

    return video_qa.run(
        options.input,
        options.output,
        *configured,
        questions=options.question,
        options=video_qa.AnswerOptions(
            options.max_tokens, options.temperature, tuple(options.choices)
        ),
        concurrency=options.concurrency,
    )


def run_eval(options: argparse.Namespace) -> int:
    file, engine_config = _file_and_engine(options)
    from vlm_serve.eval.command import evaluate

    splitting = collect(SPLITTING, vars(options), os.environ, file)
    return evaluate(options, _model(options, file), engine_config, **splitting)


def run_plan(options: argparse.Namespace) -> int:
    model, engine_config, _ = _model_and_configs(options)
    from vlm_serve.commands import plan as plan_command

    plan_command.run(
        model, engine_config, as_json=options.json, device_memory=options.device_memory
    )
    return 0


def run_models(options: argparse.Namespace) -> int:
    from vlm_serve.commands import models as models_command

    models_command.run(as_json=options.json)
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    from vlm_serve.commands import doctor as doctor_command

    doctor_command.run(as_json=options.json)
    return 0


def run_completion(options: argparse.Namespace) -> int:
    print(script(options.shell), end="")
    return 0


def run_chat(options: argparse.Namespace) -> int:
    from vlm_serve.commands.chat import Asked, chat, chat_with_server

    asked = Asked(
        options.question,
        options.image,
        options.video,
        options.max_tokens,
        options.temperature,
        options.report,
        options.show_reasoning,
    )
    if options.base_url:
        api_key = options.api_key or os.environ.get("OPENAI_API_KEY")
        return chat_with_server(
            options.base_url, api_key, asked, options.model or options.model_flag
        )
    file, engine_config = _file_and_engine(options)
    splitting = collect(SPLITTING, vars(options), os.environ, file)
    model = _model(options, file)
    return chat(model, engine_config, asked, lora=options.lora, **splitting)


if __name__ == "__main__":
    sys.exit(main())
