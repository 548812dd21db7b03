"""What an engine cannot start with is named in one sentence, without a traceback."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint

from vlm_serve.commands.plan import make
from vlm_serve.engine.start.build import build, longest_context
from vlm_serve.engine.steps.memory import MemoryPlan, check_pools, host_memory, named_shortage
from vlm_serve.engine.steps.ranks.start import _rendezvous
from vlm_serve.errors import ConfigError, InvalidRequestError
from vlm_serve.models.registry import read_spec
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.prepare import Preprocessor

MEMORY = MemoryPlan(1 << 40, 64, 4096, 0, 1 << 28, 0, 0)
DEMO = Path(__file__).parents[3] / "vlm_serve" / "demo" / "dense"


@pytest.mark.parametrize("length", [32769, 100_000])
def test_a_context_beyond_the_models_is_asked_for(length: int) -> None:
    config, spec = EngineConfig(max_model_len=length), read_spec(DEMO)
    with pytest.raises(ConfigError, match=rf"max_model_len is {length}.* made for 32768") as caught:
        longest_context(config, spec, MEMORY)
    assert "--allow-long-max-model-len" in caught.value.message
    with pytest.raises(ConfigError, match="made for 32768"):
        make("demo", config)
    allowed = replace(config, allow_long_max_model_len=True)
    assert longest_context(allowed, spec, MEMORY) == length
    assert make("demo", allowed).max_model_len == length
    for fits in (None, 100, 32768):
        assert longest_context(replace(config, max_model_len=fits), spec, MEMORY) == (fits or 32768)


def test_with_yarn_the_longer_context_counts(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, CheckpointSpec(max_position_embeddings=4096))
    config = EngineConfig(max_model_len=16384)
    with pytest.raises(ConfigError, match="made for 4096"):
        longest_context(config, read_spec(path), MEMORY)
    raw = json.loads((path / "config.json").read_text())
    raw["text_config"]["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0}
    (path / "config.json").write_text(json.dumps(raw))
    assert longest_context(config, read_spec(path), MEMORY) == 16384
    assert longest_context(EngineConfig(), read_spec(path), MEMORY) == 16384
    with pytest.raises(ConfigError, match="made for 16384"):
        longest_context(replace(config, max_model_len=16385), read_spec(path), MEMORY)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cache_memory": "900GiB"}, "cache_memory = 900 GiB"),
        ({"cache_memory": "100000TiB"}, "cache_memory = 1e+05 TiB"),
        ({"cache_memory": "900GiB", "prefix_cache_state_interval": 16}, "cache_memory = 900 GiB"),
        ({"host_cache_memory": "900GiB"}, "host_cache_memory is 900 GiB"),
        ({"prefix_cache_state_budget": 10**9}, "raise cache_memory"),
    ],
)
def test_memory_that_the_machine_lacks(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build("demo", EngineConfig(device="cpu", **options))
    assert named in caught.value.message and "\n" not in caught.value.message


def test_all_pools_count() -> None:
    memory = MemoryPlan(
        cache_memory=host_memory() // 2,
        block_size=64,
        block_bytes=4096,
        snapshot_bytes=host_memory() // 8,
        num_blocks=1,
        num_snapshot_rows=0,
        num_live_rows=3,
    )
    check_pools(memory, 1, torch.device("cpu"))
    with pytest.raises(ConfigError, match="of live states needs"):
        check_pools(replace(memory, num_live_rows=5), 1, torch.device("cpu"))
    with pytest.raises(ConfigError, match="at most"):
        check_pools(memory, 2, torch.device("cpu"))


def test_memory_that_is_not_free_is_named() -> None:
    for error in (MemoryError("no"), torch.OutOfMemoryError("no")):
        with pytest.raises(ConfigError, match="not enough free memory"), named_shortage(MEMORY):
            raise error


def test_the_command_says_it_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vlm_serve.cli", "serve", "demo"]
        + ["--port", "0", "--device", "cpu", "--cache-memory", "900GiB"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("vlm-serve: the cache of cache_memory = 900 GiB")


def text_and_picture(modality: str) -> list[dict[str, Any]]:
    part = {"type": f"{modality}_url", f"{modality}_url": {"url": "data:image/png;base64,AAAA"}}
    return [{"role": "user", "content": [part]}]


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "video_preprocessor_config.json", "both"]
)
def test_a_missing_processor_is_named_at_start_and_to_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path = make_checkpoint(tmp_path, CheckpointSpec())
    names = ("preprocessor_config.json", "video_preprocessor_config.json")
    for each in names:
        if name in (each, "both"):
            (path / each).unlink()
    with caplog.at_level(logging.WARNING):
        preprocessor = Preprocessor(path, block_size=16, root_key=lambda salt: bytes(32))
    kinds = {"image": names[0], "video": names[1]}
    for modality, file in kinds.items():
        # The pictures' file also serves videos.
        missing = name == "both" or (file == name and modality == "image")
        sentence = f"the checkpoint has no {file}: the model takes no {modality}s"
        assert (sentence in caplog.text) == missing
        if missing:
            with pytest.raises(InvalidRequestError, match=f"no {modality}s: .* no {file}") as error:
                preprocessor.prepare(text_and_picture(modality))
            assert error.value.code == "no_media"
    preprocessor.close()


@pytest.mark.parametrize("tokens", [10**12, 10**18, 10**30])
def test_shared_memory_that_the_machine_lacks(tokens: int) -> None:
    config = EngineConfig(device="cpu", tensor_parallel_size=2, max_num_batched_tokens=tokens)
    source = SimpleNamespace(compiled=True, spec=read_spec(DEMO))
    rendezvous = _rendezvous(source, config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lower max_num_batched_tokens"), rendezvous:
        pass
    own = f"vlm-serve-ranks-{os.getpid()}-*"
    assert not [*Path("/dev/shm").glob(own), *Path(tempfile.gettempdir()).glob(own)]
