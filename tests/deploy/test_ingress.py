"""The gateway as an application of Serve, as far as it goes without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import serve

from vlm_serve.deploy import app
from vlm_serve.errors import ConfigError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "replicas.yaml"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.yaml"
    path.write_text("one: first\n")
    return str(path)


def test_the_example_can_be_built(keys: str) -> None:
    resource = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    config = yaml.safe_load(resource["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    assert application["import_path"] == "vlm_serve.deploy:app"
    built = app({**application["args"], "tenant_keys": keys})
    assert isinstance(built, serve.Application)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"replica": 2}, "replica"),
        ({"fronts": 0}, "fronts must be a positive integer, got 0"),
        ({"replicas": 0}, "replicas must be at least 1, got 0"),
        ({"tenant_keys": "/nowhere/keys.yaml"}, "tenant_keys /nowhere/keys.yaml"),
        ({"response_store": "1MiB"}, "response_store needs one replica"),
        ({"media_store": "1MiB"}, "media_store needs one replica"),
        ({"media_files": "1MiB"}, "media_files needs one replica"),
        ({"allow_weight_updates": True}, "allow_weight_updates is for `vlm-serve deploy`"),
        ({"lora_modules": ["demo=/x"]}, "lora_modules: 'demo' is a name of the model"),
    ],
)
def test_what_is_wrong_is_named(keys: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        app({"tenant_keys": keys, **wrong})


def test_keys_are_demanded_wherever_the_proxy_listens() -> None:
    with pytest.raises(ConfigError, match="no API key is set"):
        app({"model": "demo"})
    assert app({"model": "demo", "without_keys": True})
