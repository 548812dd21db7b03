"""The command line: flags come from the option tables, and it starts without loading anything."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vlm_serve.cli import _model, _model_and_configs, build_parser, collect, main
from vlm_serve.commands.config_file import read_config_file
from vlm_serve.commands.long_parts import LONG_PARTS
from vlm_serve.errors import ConfigError
from vlm_serve.models.registry import FAMILIES
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import Option, check_environment, from_environment, options_of
from vlm_serve.server.config import ServerConfig

ALL: tuple[Option, ...] = (*options_of(ServerConfig), *options_of(EngineConfig))


def flags_of(*arguments: str) -> dict[str, Any]:
    return vars(build_parser().parse_args(arguments))


@pytest.mark.parametrize(
    "command",
    [
        *("", "serve", "plan", "models", "doctor", "chat", "run-batch", "video-qa"),
        *("eval", "eval longbench", "eval video", "eval lmms"),
    ],
)
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        "import sys\n"
        "from vlm_serve.cli import main\n"
        "try:\n"
        f"    main([*{command.split()!r}, '--help'])\n"
        "except SystemExit as done:\n"
        "    assert done.code == 0\n"
        "heavy = {'torch', 'fastapi', 'pydantic', 'transformers', 'numpy', 'av'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: vlm-serve" in done.stdout


def test_models_lists_what_can_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "model type"
    *table, blank, formats = rows
    assert [row.split()[0] for row in table] == list(FAMILIES)
    assert all(
        row.endswith(served.models) for row, served in zip(table, FAMILIES.values(), strict=True)
    )
    assert not blank and formats.endswith(", ".join(FAMILIES["qwen3"].quantised))
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["qwen3_vl_moe"] == {
        "models": "Qwen3-VL 30B-A3B, 235B-A22B",
        "media": ["image", "video"],
        "state": False,
        "experts": True,
        "compiled_step": True,
        "quantised": [
            "fp8",
            "gptq",
            "awq",
            "compressed-tensors",
            "modelopt",
            "auto-round",
            "gguf",
        ],
    }
    assert listed["qwen3_next"]["media"] == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, vlm_serve; assert not {'torch', 'fastapi'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_option_has_its_flag_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for item in ALL:
        for flag in item.flags:
            assert f"{flag} " in text or f"{flag}," in text or f"{flag}\n" in text
        assert item.group in text


def test_what_follows_serve_may_follow_plan() -> None:
    """Every option of either table, with a value that its own description calls right."""
    given = [text for item in ALL if item.kind != "bool" for text in (item.flags[0], example(item))]
    given += [item.flags[0] for item in ALL if item.kind == "bool"]
    serve, plan = (flags_of(name, "demo", *given) for name in ("serve", "plan"))
    assert {item.name for item in ALL} <= serve.keys()
    for name in serve.keys() - {"run"}:
        assert plan[name] == serve[name]


def example(item: Option) -> str:
    if item.choices:
        return str(item.choices[-1])
    if item.kind == "object":
        return '{"x": 1}'
    return "x" if item.kind in ("text", "list") else f"{item.low or 1:g}"


def test_names_do_not_collide() -> None:
    names = [name for item in ALL for name in (item.name, *item.aliases)]
    assert len(names) == len(set(names))


def test_flags_that_are_not_given_leave_no_trace() -> None:
    options = {item.name for item in ALL}
    assert not options & flags_of("serve").keys()


def test_flags_are_read_in_their_types() -> None:
    flags = flags_of(
        *("serve", "some/model", "--host", "0.0.0.0", "--port", "9", "--max-num-seqs", "3"),
        *("--cache-memory", "1GiB", "--no-enable-prefix-caching", "--deterministic"),
        *("--kv-dtype", "int8", "--state-interval", "4", "--served-model-name", "a,b"),
        *("--request-timeout", "1.5", "--api-key", "x"),
    )
    assert flags["model"] == "some/model"
    engine = EngineConfig(**collect(options_of(EngineConfig), flags, {}, {}))
    assert engine.cache_memory_bytes == 1 << 30
    assert engine.enable_prefix_caching is False
    assert engine.deterministic is True
    assert engine.kv_cache_dtype == "int8"
    assert engine.prefix_cache_state_interval == 4
    assert engine.max_num_seqs == 3
    server = ServerConfig(**collect(options_of(ServerConfig), flags, {}, {}))
    assert (server.host, server.port) == ("0.0.0.0", 9)
    assert server.served_model_name == ("a", "b")
    assert server.request_timeout == 1.5
    assert server.api_key == ("x",)


def test_a_list_may_be_given_in_pieces() -> None:
    flags = flags_of("serve", "--api-key", "a,b", "--port", "1", "--api-key", "c", "--port", "2")
    server = ServerConfig(**collect(options_of(ServerConfig), flags, {}, {}))
    assert (server.api_key, server.port) == (("a", "b", "c"), 2)


def test_flags_win_over_the_environment_and_that_over_the_file() -> None:
    options = options_of(EngineConfig)
    file = {"max_num_seqs": 1, "threads": 1, "block_size": 16, "port": 1}
    environment = {"VLM_SERVE_MAX_NUM_SEQS": "2", "VLM_SERVE_THREADS": "2"}
    found = collect(options, {"max_num_seqs": 3}, environment, file)
    assert found == {"max_num_seqs": 3, "threads": 2, "block_size": 16}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-num-seqs", "x"], "max_num_seqs"),
        (["--cache-memory", "much"], "cache_memory"),
        (["--block-size", "17"], "block_size"),
        (["--port", "70000"], "port"),
    ],
)
def test_a_bad_flag_is_a_usage_error(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{name} must be" in said
    assert said.startswith("vlm-serve serve: ") and said.count("\n") == 1, "no usage"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--max-num-sqs", "3"], "no --max-num-sqs; did you mean --max-num-seqs?"),
        (["serve", "demo", "other"], "there is no place for 'other' (--help"),
        (["chat", "demo", "Where", "is", "it"], "'is', 'it'; put a text of several words into"),
        (["plan", "--prot", "3"], "there is no --prot; did you mean --port? (--help"),
        (["chat", "hi", "--imgae", "x"], "there is no --imgae; did you mean --image?"),
        (["sevre"], "there is no command 'sevre'; did you mean serve?"),
        (["version"], "did you mean --version?"),
        (["nothing"], "there is no command 'nothing': serve, deploy, plan, "),
        (["serve", "--help", "cach"], "there is no group 'cach'; did you mean cache?"),
        (["serve", "--gpu-memory-utilization", "0.9"], "here it is --cache-memory SIZE"),
        (["serve", "--mem-fraction-static=0.8"], "here it is --cache-memory SIZE"),
        (["serve", "--quant-policy", "8"], "here it is --kv-cache-dtype"),
        (["serve", "--enable-lora"], "here it is --lora-modules NAME=PATH, alone"),
        (
            ["serve", "--linear-prefix-cache-interval-blocks", "8"],
            "here it is --prefix-cache-state-interval",
        ),
    ],
)
def test_what_is_not_there_is_named_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_the_model_may_be_a_flag(command: str) -> None:
    flag = ["--model", "some/model"]
    for arguments in (["some/model"], flag, ["some/model", *flag]):
        options = build_parser().parse_args([command, *arguments])
        assert _model(options, {}) == "some/model"
    with pytest.raises(ConfigError, match="both 'a' and 'b'"):
        _model(build_parser().parse_args([command, "a", "--model", "b"]), {})


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "Where?"],
        ["demo", "Where?", "--image", "a.png"],
        ["--image", "a.png", "demo", "Where?"],
        ["demo", "--image", "a.png", "Where?"],
        ["--model", "demo", "--image", "a.png", "Where?"],
        ["Where?", "--model", "demo"],
    ],
)
def test_chat_takes_its_model_as_serve_does(words: list[str]) -> None:
    options = build_parser().parse_args(["chat", *words])
    assert (_model(options, {}), options.question) == ("demo", "Where?")
    assert options.image == (["a.png"] if "--image" in words else [])


def test_a_question_alone_is_asked_of_the_default_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = build_parser().parse_args(["chat", "Where?", "--threads", "1"])
    assert (options.model, options.question) == (None, "Where?")
    with pytest.raises(SystemExit):
        build_parser().parse_args(["chat", "demo", "Where?", "more"])
    assert "there is no place for 'more'" in capsys.readouterr().err


def test_a_command_says_what_takes_long(tmp_path: Path) -> None:
    code = (
        "import logging, sys\n"
        "from vlm_serve.cli import main\n"
        "from vlm_serve.commands.long_parts import LONG_PARTS\n"
        "status = main(sys.argv[1:])\n"
        "for name in LONG_PARTS:\n"
        "    logging.getLogger(name).info('half a minute')\n"
        "logging.getLogger('vlm_serve.engine.core.loop').info('a step')\n"
        "sys.exit(status)\n"
    )
    begun = [sys.executable, "-c", code, "chat", "nosuch", "hi", "--image", str(tmp_path / "a")]
    done = subprocess.run(begun, capture_output=True, text=True, check=False)
    first, second, *others = done.stderr.splitlines()
    assert first == "vlm-serve: loading its libraries, some seconds"
    assert "No such file" in second and done.stdout == ""
    assert others == ["vlm-serve: half a minute"] * len(LONG_PARTS)


def test_modules_that_may_take_long_exist_and_say_so() -> None:
    root = Path(__file__).parents[1] / "vlm_serve"
    for name in LONG_PARTS:
        path = root / Path(*name.split(".")[1:]).with_suffix(".py")
        assert "_log.info(" in path.read_text(encoding="utf-8"), name


KUBERNETES = {
    "VLM_SERVE_SERVICE_HOST": "10.0.0.1",
    "VLM_SERVE_SERVICE_PORT_HTTP": "8000",
    "VLM_SERVE_PORT": "tcp://10.0.0.1:8000",
    "VLM_SERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
    "VLM_SERVE_WEB_SERVICE_HOST": "10.0.0.2",
    "VLM_SERVE_WEB_PORT": "udp://10.0.0.2:53",
    "VLM_SERVE_WEB_PORT_53_UDP": "udp://10.0.0.2:53",
}
"""What it sets in a pod beside services called vlm-serve and vlm-serve-web."""


def test_variables_of_kubernetes_are_no_options() -> None:
    options = options_of(ServerConfig)
    check_environment(options, KUBERNETES)
    assert from_environment(options, KUBERNETES) == {}
    assert from_environment(options, {"VLM_SERVE_PORT": "81"}) == {"port": 81}
    with pytest.raises(ConfigError, match="port"):
        from_environment(options, {"VLM_SERVE_PORT": "tcp"})


def test_a_mistyped_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for fine, value in KUBERNETES.items():
        monkeypatch.setenv(fine, value)
    monkeypatch.setenv("VLM_SERVE_MAX_NUM_SQS", "3")
    for arguments in (["serve"], ["plan"], ["chat", "hi"], ["run-batch", "-i", "a", "-o", "b"]):
        assert main(arguments) == 2
        assert "VLM_SERVE_MAX_NUM_SQS; did you mean VLM_SERVE_MAX_NUM_SEQS?" in (
            capsys.readouterr().err
        )


def test_every_variable_that_is_read_is_known() -> None:
    root = Path(__file__).parents[1]
    read = {
        name
        for folder in ("vlm_serve", "kernels", "cache", "preprocess")
        for path in (root / folder).rglob("*.py")
        for name in re.findall(r"environ[^\n]*\"(VLM_SERVE_[A-Z_]+)\"", path.read_text())
    }
    assert "VLM_SERVE_NATIVE_ARCH" in read
    check_environment(ALL, dict.fromkeys(read, ""))


def test_a_picture_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--image", "--video"):
        assert main(["chat", "hi", flag, "nosuch.jpg"]) == 2
        assert f"{flag} nosuch.jpg: No such file" in capsys.readouterr().err


def test_a_medium_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = Path(__file__).parents[1] / "examples" / "media" / "star.png"
    (tmp_path / "notes.txt").write_text("A star.")
    given = ["--image", str(picture), "--image", str(tmp_path / "notes.txt")]
    assert main(["chat", "demo", "hi", "--cache-memory", "64MiB", *given]) == 1
    assert "notes.txt: not an image of a supported format" in capsys.readouterr().err


def test_options_that_contradict_each_other_end_with_status_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--max-num-seqs", "64", "--max-num-batched-tokens", "64"]) == 2
    assert "max_num_batched_tokens must be at least" in capsys.readouterr().err


def test_room_for_later_adapters_follows_from_the_server_s_option(tmp_path: Path) -> None:
    flags = ["serve", "demo", "--allow-runtime-lora", "--allowed-lora-path", str(tmp_path)]
    _, engine, server = _model_and_configs(build_parser().parse_args(flags))
    assert engine.reserve_loras and server.allow_runtime_lora
    _, engine, _ = _model_and_configs(build_parser().parse_args(["serve", "demo"]))
    assert not engine.reserve_loras


def test_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: some/model\nblock-size: 32\nport: 9000\nserved-model-name: [a, b]\n")
    assert read_config_file(str(path)) == {
        "model": "some/model",
        "block_size": 32,
        "port": 9000,
        "served_model_name": ["a", "b"],
    }
    assert read_config_file(None) == {}


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "nonsense: 1\n", "\xff"])
def test_a_bad_config_file_is_said_so(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_bytes(text.encode("latin-1"))
    assert main(["serve", "--config", str(path)]) == 2
    assert "config file" in capsys.readouterr().err
    path.write_text("max-num-sqs: 3\n")
    assert main(["serve", "--config", str(path)]) == 2
    assert "max-num-sqs; did you mean max_num_seqs?" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        read_config_file(str(tmp_path / "none.yaml"))


def test_a_missing_checkpoint_ends_with_status_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "none"), "--port", "0", "--cache-memory", "1MiB"]) == 1
    assert capsys.readouterr().err.startswith("vlm-serve: ")


def test_the_help_begins_with_what_one_types(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "chat", "run-batch"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"usage: vlm-serve {command} ") and "--" not in lines[0]
        assert "examples:" in lines[:4]


def test_the_command_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0 and "serve a model over HTTP" in capsys.readouterr().out


def test_the_help_of_one_group_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help", "adapters"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("adapters:") and "--max-loras" in shown and "--port" not in shown


@pytest.mark.processes
def test_a_reader_that_has_enough_ends_a_command_quietly() -> None:
    command = f"{shlex.quote(sys.executable)} -m vlm_serve models | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == "" and done.stdout.strip() in ("0", "141")


@pytest.mark.parametrize("command", ["plan", "serve"])
def test_an_error_of_a_folder_names_the_folder(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main([command, "model"]) == 1
    assert f"vlm-serve: {tmp_path / 'model'}: the checkpoint has no " in capsys.readouterr().err
    (tmp_path / "model" / "config.json").write_text("{")
    assert main([command, "./model"]) == 1
    assert f"vlm-serve: {tmp_path / 'model'}: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["./nodir", "../nodir/x", "~/nodir", ".hidden/model"])
def test_a_path_is_never_a_hub_id(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name]) == 1
    said = capsys.readouterr().err
    assert "is neither a directory nor" in said and "fetching" not in said
