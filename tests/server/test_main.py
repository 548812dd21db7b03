"""What `vlm-serve serve` says before it loads a model."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.serving import listen
from vlm_serve.server.main import absent_folders, serve


def test_folders_that_are_not_there_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    engine = EngineConfig(allowed_local_media_path=str(tmp_path / "gone"))
    server = ServerConfig(allow_runtime_lora=True, allowed_lora_path=str(file))
    media, adapters = absent_folders(engine, server)
    assert media.startswith(f"allowed_local_media_path: there is no folder {tmp_path / 'gone'} ")
    assert adapters.startswith(f"allowed_lora_path: there is no folder {file} ")
    there = EngineConfig(allowed_local_media_path=str(tmp_path))
    assert absent_folders(there, ServerConfig()) == []


def test_a_port_in_use_is_told_how_to_choose_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf":{port}: .*; name another port, or 0 for any"):
            listen(ServerConfig(port=port))


@pytest.mark.parametrize("names", [(), ("other", "mine")])
def test_an_adapter_with_a_name_of_the_model_is_refused_at_once(names: tuple[str, ...]) -> None:
    """The model answered in its place before."""
    model = names[-1] if names else "demo"
    engine, server = (
        EngineConfig(lora_modules=(f"{model}=/x",)),
        ServerConfig(port=0, served_model_name=names),
    )
    with pytest.raises(ConfigError, match=f"lora_modules: '{model}' is a name of the model"):
        serve("demo", engine, server)
