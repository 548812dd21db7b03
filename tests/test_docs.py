"""What the README and the docs say about options and fields is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sampling_table import sampling_table

from vlm_serve.cli import main
from vlm_serve.commands.plan import make as make_plan
from vlm_serve.deploy.options import DeployConfig
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import markdown_table, options_of
from vlm_serve.sampling_params import SamplingParams, sampling_options
from vlm_serve.server.api.cache.inspection import ProbeRequest
from vlm_serve.server.api.cache.pins import PinRequest
from vlm_serve.server.api.completions import CompletionRequest
from vlm_serve.server.api.generate import (
    GENERATE_REFUSED,
    SAMPLING_REFUSED,
    GenerateRequest,
    TokenSampling,
)
from vlm_serve.server.api.messages import MESSAGES_REFUSED, MessagesRequest
from vlm_serve.server.api.responses.request import RESPONSES_REFUSED, ResponsesRequest
from vlm_serve.server.api.shared.chat_request import ChatCompletionRequest
from vlm_serve.server.api.shared.unknown_fields import UNIMPLEMENTED
from vlm_serve.server.api.tokenization import DetokenizeRequest, TokenizeRequest
from vlm_serve.server.config import ServerConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = (EngineConfig, ServerConfig, DeployConfig)
SAMPLING = {
    name
    for each in sampling_options(SamplingParams)
    for names in each.names.values()
    for name in names
}
CHECKPOINTS = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
HTTP = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")


def section(text: str, name: str) -> str:
    return text.split(f"<!-- begin {name} -->\n")[1].split(f"<!-- end {name} -->")[0].strip() + "\n"


def test_the_documents_have_the_option_tables() -> None:
    assert section(OPTIONS, "server options") == markdown_table(options_of(ServerConfig))
    assert section(OPTIONS, "deploy options") == markdown_table(options_of(DeployConfig))
    assert section(OPTIONS, "engine options") == markdown_table(options_of(EngineConfig))


def test_the_readme_is_short_enough_to_be_read_once() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 200


@pytest.mark.parametrize(("server", "least"), [("vllm", 21), ("sglang", 10), ("lmdeploy", 10)])
def test_options_beside_those_of_other_servers_exist(server: str, least: int) -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    flags = {flag for config in CONFIGS for option in options_of(config) for flag in option.flags}
    flags |= {f"--no-{flag[2:]}" for flag in flags}
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", section(text, f"{server} flags"), re.MULTILINE)
    assert len(rows) >= least
    for theirs, ours in rows:
        cells = theirs if ours == "the same" else ours
        for flag in re.findall(r"`(?:vlm-serve deploy )?(--[\w-]+)", cells):
            assert flag in flags, f"{theirs}: {flag}"


@pytest.mark.parametrize("server", ["sglang", "lmdeploy"])
def test_the_command_line_advises_what_the_document_does(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(--[\w-]+)` \| .*?(--[\w-]+)", section(text, f"{server} flags"), re.M)
    assert len(rows) >= 9
    for theirs, ours in rows:
        with pytest.raises(SystemExit):
            main(["serve", theirs, "1"])
        assert ours in capsys.readouterr().err, theirs


def test_options_that_documents_advise_exist() -> None:
    flags = {flag for config in CONFIGS for option in options_of(config) for flag in option.flags}
    flags |= {f"--no-{flag[2:]}" for flag in flags}
    for name in ("troubleshooting", "install", "checkpoints"):
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        advised = set(re.findall(r"`(--[\w-]+)", text)) - {"--flag", "--torch-backend"}
        assert advised and advised <= flags, f"{name}: {advised - flags}"


def memory_table() -> str:
    """What `vlm-serve plan` says of the weights of public shapes, in GiB."""
    heads = ("checkpoint", "GPU", "GPU, int8", "GPU, int4", "CPU", "CPU, int8", "CPU, int4")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in ("Qwen3.5-4B", "Qwen3.5-27B", "Qwen3.5-35B-A3B"):
        model = str(ROOT / "tests" / "data" / f"{name.lower()}.json")
        cells = [name]
        for device in ("cuda", "cpu"):
            for quantization in (None, "int8", "int4"):
                config = EngineConfig(
                    device=device,
                    dtype="bfloat16",
                    quantization=quantization,
                    cache_memory="4GiB",
                )
                size = make_plan(model, config).weights.in_memory
                cells.append(f"{size / (1 << 30):.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_documents_say_what_real_checkpoints_take() -> None:
    assert section(CHECKPOINTS, "memory") == memory_table()
    held = []
    for compute in ("bfloat16", "float32"):
        config = EngineConfig("cpu", "bfloat16", compute_dtype=compute, cache_memory="4GiB")
        plan = make_plan(str(ROOT / "tests" / "data" / "qwen3.5-4b.json"), config)
        held.append((f"{plan.memory.num_blocks * 64:,}".replace(",", " "), plan.memory))
    (tokens, memory), (fewer, _) = held
    snapshots = memory.num_snapshot_rows
    assert f"holds {tokens} tokens and {snapshots}\nsnapshots" in CHECKPOINTS
    assert f"in twice the bytes ({fewer} tokens)" in CHECKPOINTS


def fields_in(text: str) -> set[str]:
    """Names in the first column of a table."""
    rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_field_with_an_effect_is_documented() -> None:
    documented = fields_in(section(HTTP, "fields"))
    models = (
        ChatCompletionRequest,
        CompletionRequest,
        TokenizeRequest,
        DetokenizeRequest,
        ProbeRequest,
        PinRequest,
    )
    declared = {name for model in models for name in model.model_fields}
    assert documented == (declared - SAMPLING) | {"logprobs"}


def test_every_sampling_option_is_documented() -> None:
    assert section(HTTP, "sampling options") == sampling_table()


def given_reasons() -> set[str]:
    """Those that the code gives: `cache/matching.py`, and what sets one elsewhere."""
    code = (ROOT / "cache" / "matching.py").read_text(encoding="utf-8")
    found = re.findall(r"return .*", code)
    for path in (
        ROOT / "cache" / "prefix_cache.py",
        ROOT / "vlm_serve" / "engine" / "features" / "tiers" / "fetching.py",
    ):
        found += re.findall(r"reason=?.*", path.read_text(encoding="utf-8"))
    return {name for line in found for name in re.findall(r'"(\w+)"', line)}


def test_every_reason_is_documented() -> None:
    given = given_reasons()
    assert {"unseen", "disabled", "prompt_logprobs", "tier_error"} <= given
    assert fields_in(section(HTTP, "reasons")) == given


def test_the_fields_of_the_other_forms_of_chat_are_documented() -> None:
    for name, model, refused in (
        ("responses", ResponsesRequest, RESPONSES_REFUSED),
        ("messages", MessagesRequest, MESSAGES_REFUSED),
        ("generate", GenerateRequest, GENERATE_REFUSED),
        ("sampling", TokenSampling, SAMPLING_REFUSED),
    ):
        declared = set(model.model_fields) - SAMPLING
        if declared:
            assert fields_in(section(HTTP, f"{name} fields")) - SAMPLING == declared
        assert fields_in(section(HTTP, f"refused {name} fields")) == set(refused)


def test_every_refused_field_is_documented() -> None:
    assert fields_in(section(HTTP, "refused fields")) == set(UNIMPLEMENTED)


def test_links_in_the_documents_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_picture_that_is_shown_is_there() -> None:
    for folder in (ROOT, ROOT / "docs"):
        for path in folder.glob("*.md"):
            text = path.read_text(encoding="utf-8")
            names = re.findall(r'!\[[^\]]*\]\(([^)]+)\)|<img src="([^"]+)"', text)
            for name in ("".join(pair) for pair in names):
                assert (folder / name).is_file(), f"{path.name} shows {name}"


def test_every_view_is_shown_large_and_small_light_and_dark() -> None:
    text = (ROOT / "docs" / "page.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "screenshots").iterdir():
        assert f'"screenshots/{path.name}"' in text
    assert len(list((ROOT / "docs" / "screenshots").iterdir())) == 3 * 2 * 2


def test_files_of_the_examples_that_documents_name_exist() -> None:
    seen = 0
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"(?<![\w/.])(?:\.\./)*(examples/[\w/.-]*[\w/])", text):
            seen += 1
            assert (ROOT / name).exists() or (ROOT / f"{name}.md").is_file(), f"{path.name}: {name}"
    assert seen > 25


def test_the_photograph_is_the_one_whose_licence_is_named() -> None:
    import numpy as np
    from PIL import Image
    from skimage.data import chelsea

    shown = np.asarray(Image.open(ROOT / "examples" / "media" / "photo.jpg"), np.float32)
    assert abs(shown - chelsea()).mean() < 4
    text = (ROOT / "examples" / "media" / "README.md").read_text(encoding="utf-8")
    assert "`photo.jpg` | a photograph of a cat by Stefan van der Walt, CC0" in text
