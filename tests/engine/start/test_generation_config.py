"""Defaults of sampling, revisions and the limit of log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint

from vlm_serve.commands.plan import make
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.start.build import find_checkpoint, with_generation
from vlm_serve.errors import CheckpointError, ConfigError, FieldError, ModelNotFoundError
from vlm_serve.models.files import resolve_checkpoint
from vlm_serve.models.registry import read_spec
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

OWN = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 3}
SMALL: dict[str, Any] = {"device": "cpu", "cache_memory": "16MiB", "block_size": 16}
QUESTION = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("model"), CheckpointSpec(vision_depth=0))
    own = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(own | OWN))
    return path


@contextmanager
def pipeline(model: Path | str, **options: Any) -> Iterator[Pipeline]:
    with Pipeline(model, EngineConfig(**SMALL, **options)) as made:
        yield made


def test_auto_takes_the_checkpoints_own(checkpoint: Path) -> None:
    with pipeline(checkpoint) as pipe:
        assert pipe.engine.spec.generation["top_k"] == 7
        params = SamplingParams(ignore_eos=True)
        assert pipe.chat(QUESTION, params).usage.completion_tokens == 3
        more = SamplingParams(ignore_eos=True, max_tokens=9)
        assert pipe.chat(QUESTION, more).usage.completion_tokens == 3
        fewer = SamplingParams(ignore_eos=True, max_tokens=2)
        assert pipe.chat(QUESTION, fewer).usage.completion_tokens == 2
        # A prompt that leaves less room than the limit is no error.
        context = pipe.engine.max_model_len
        assert pipe.generate([5] * (context - 2), params).usage.completion_tokens == 2


def test_vllm_takes_neutral_defaults_and_the_checkpoints_ends(checkpoint: Path) -> None:
    with pipeline(checkpoint) as own, pipeline(checkpoint, generation_config="vllm") as neutral:
        assert neutral.engine.spec.generation == {}
        ends = [each.engine.preprocessor.tokenizer.eos_ids for each in (own, neutral)]
        assert ends[0] == ends[1]
        params = SamplingParams(ignore_eos=True, max_tokens=5)
        assert neutral.chat(QUESTION, params).usage.completion_tokens == 5
        filled = SamplingParams().with_defaults(neutral.engine.spec.generation)
        assert (filled.temperature, filled.top_k) == (1.0, 0)


def test_a_folder_takes_its_defaults_and_its_ends(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"top_k": 9, "eos_token_id": [11]}))
    with pipeline(checkpoint, generation_config=str(tmp_path)) as pipe:
        assert pipe.engine.spec.generation == {"top_k": 9, "eos_token_id": [11]}
        assert 11 in pipe.engine.preprocessor.tokenizer.eos_ids


def test_a_bad_folder_is_named(checkpoint: Path, tmp_path: Path) -> None:
    config, spec = EngineConfig(generation_config=str(tmp_path)), read_spec(checkpoint)
    with pytest.raises(ConfigError, match="generation_config must be auto, vllm or a folder"):
        with_generation(spec, config)
    (tmp_path / "generation_config.json").write_text("no JSON")
    with pytest.raises(CheckpointError, match="generation_config.json cannot be read"):
        with_generation(spec, config)


def test_a_revision_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    asked: list[Any] = []

    def snapshot_download(name: str, *, revision: str | None, **_: object) -> str:
        asked.append((name, revision))
        if revision == "none":
            import httpx

            response: Any = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
            raise errors.RevisionNotFoundError("no", response=response)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert find_checkpoint("some/model", revision="v2") == tmp_path
    assert resolve_checkpoint("some/model") == tmp_path
    with pytest.raises(ModelNotFoundError, match="not this revision"):
        resolve_checkpoint("some/model", revision="none")
    assert asked == [("some/model", "v2"), ("some/model", None), ("some/model", "none")]
    with pytest.raises(CheckpointError):
        make("some/model", EngineConfig(revision="v3"))
    assert asked[-1] == ("some/model", "v3")


def test_a_folder_has_no_revisions(checkpoint: Path) -> None:
    for model in ("demo", str(checkpoint)):
        with pytest.raises(ConfigError, match="revision 'v2' has no effect"):
            Engine.from_checkpoint(model, EngineConfig(revision="v2"))
        with pytest.raises(ConfigError, match="revision 'v2' has no effect"):
            make(model, EngineConfig(revision="v2"))


def test_the_limit_of_logprobs(checkpoint: Path) -> None:
    with pipeline(checkpoint, max_logprobs=30) as pipe:
        found = pipe.chat(QUESTION, SamplingParams(max_tokens=2, logprobs=30, ignore_eos=True))
        assert found.logprobs is not None and all(len(each) >= 30 for each in found.logprobs)
        rows = pipe.chat(QUESTION, SamplingParams(max_tokens=1, prompt_logprobs=30))
        assert rows.prompt_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            fields: dict[str, Any] = {name: 31}
            with pytest.raises(FieldError, match=rf"{name} must be at most 30 .*--max-logprobs"):
                pipe.chat(QUESTION, SamplingParams(**fields))
    with (
        pipeline(checkpoint) as pipe,
        pytest.raises(FieldError, match="logprobs must be at most 20"),
    ):
        pipe.chat(QUESTION, SamplingParams(logprobs=21))
