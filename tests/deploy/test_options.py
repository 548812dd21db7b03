"""What may be asked of a deployment, and what is refused with one sentence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server_process import COMMAND

from vlm_serve.deploy.checks import check
from vlm_serve.deploy.options import DeployConfig
from vlm_serve.deploy.serving import max_open_requests, replicas_for, with_threads
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig


def run(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [*COMMAND, "deploy", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    return done.returncode, done.stderr


def test_whoever_listens_beyond_loopback_needs_keys() -> None:
    engine, deploy = EngineConfig(), DeployConfig()
    with pytest.raises(ConfigError, match="host 0.0.0.0 is not loopback and no API key is set"):
        check(deploy, ServerConfig(host="0.0.0.0"), engine)
    check(deploy, ServerConfig(host="0.0.0.0", api_key=("secret",)), engine)
    check(DeployConfig(without_keys=True), ServerConfig(host="0.0.0.0"), engine)
    check(deploy, ServerConfig(host="127.0.0.1"), engine)


def test_what_one_process_keeps_needs_one_replica(tmp_path: Path) -> None:
    stored = ServerConfig(response_store="1MiB")
    with pytest.raises(ConfigError, match="response_store needs one replica"):
        check(DeployConfig(replicas=2), stored, EngineConfig())
    with pytest.raises(ConfigError, match="response_store needs one replica"):
        check(DeployConfig(replicas=1, max_replicas=2), stored, EngineConfig())
    assert check(DeployConfig(replicas=1), stored, EngineConfig()) == stored
    several = check(DeployConfig(replicas=2), ServerConfig(), EngineConfig())
    assert several.response_store_bytes == 0 < ServerConfig().response_store_bytes
    assert several.media_store_bytes == 0 < ServerConfig().media_store_bytes
    check(DeployConfig(replicas=2), ServerConfig(response_store=0), EngineConfig())
    files = ServerConfig(batch_store="1MiB")
    with pytest.raises(ConfigError, match="batch_store needs one replica"):
        check(DeployConfig(replicas=2), files, EngineConfig())
    check(DeployConfig(replicas=1), files, EngineConfig())
    with pytest.raises(ConfigError, match="disk_cache_path needs one replica"):
        check(DeployConfig(), ServerConfig(), EngineConfig(disk_cache_path=str(tmp_path)))


def test_most_is_not_below_least() -> None:
    with pytest.raises(ConfigError, match=r"max_replicas must be at least replicas \(3\), got 2"):
        DeployConfig(replicas=3, max_replicas=2)
    assert DeployConfig(replicas=3).most == 3
    assert DeployConfig(replicas=3, max_replicas=5).most == 5


def test_processors_are_shared_by_replicas_and_ranks() -> None:
    assert with_threads(EngineConfig(), 16, 2).threads == 8
    assert with_threads(EngineConfig(tensor_parallel_size=2), 16, 2).threads == 4
    assert with_threads(EngineConfig(), 2, 4).threads == 1
    assert with_threads(EngineConfig(threads=3), 16, 2).threads == 3


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(0, 2), (2000, 2), (2001, 3), (4999, 5), (100_000, 6)]
)
def test_replicas_follow_the_tokens_of_open_prompts(tokens: int, wanted: int) -> None:
    assert replicas_for(tokens, 1000, 2, 6) == wanted


def test_a_port_in_use_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = run("--port", str(port))
    assert status == 2
    assert said.count("\n") == 1 and f"cannot listen on 127.0.0.1:{port}" in said


def test_keys_are_asked_for_before_anything_starts() -> None:
    status, said = run("--host", "0.0.0.0", "--port", "0")
    assert status == 2
    assert said.count("\n") == 1 and "--without-keys" in said


def test_an_adapter_with_the_models_name_is_told_before_anything_starts() -> None:
    status, said = run("--port", "0", "--lora-modules", "demo=/x")
    assert status == 2 and "lora_modules: 'demo' is a name of the model" in said


def test_no_ray_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    status, said = run("--port", "0", environment={"PYTHONPATH": paths})
    assert status == 2
    assert said.startswith("vlm-serve: deploy needs the extra `ray`: pip install 'ray[serve]")


def test_the_gateway_never_imports_torch() -> None:
    modules = "gateway, main, ingress, replica_pool, router, serving, replica"
    script = (
        f"import sys\nfrom vlm_serve.deploy import {modules}\n"
        "import vlm_serve.cli\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize(
    ("engine", "most"),
    [
        (EngineConfig(), 8),
        (EngineConfig(device="cuda"), 256),
        (EngineConfig(device="cuda", max_num_seqs=16), 16),
    ],
    ids=["cpu", "gpu", "given"],
)
def test_open_requests_are_of_what_a_replica_may_run(engine: EngineConfig, most: int) -> None:
    setup: Any = SimpleNamespace(engine=engine, server=ServerConfig())
    assert max_open_requests(setup) == most + 256
