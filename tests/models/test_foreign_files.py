"""Files that are not a checkpoint's are named for what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint

from vlm_serve.errors import CheckpointError, ModelNotFoundError
from vlm_serve.models import load_model, read_spec, resolve_checkpoint
from vlm_serve.preprocess.text.tokenizer import Tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
KINDS = {
    "Git LFS pointer: run `git lfs pull`": POINTER,
    "GGUF file: name it as the model": b"GGUF\x03\x00\x00\x00" + bytes(64),
    "archive, which is not supported": b"PK\x03\x04" + bytes(64),
    "a web page": b"\n<!DOCTYPE html><title>404</title>",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", CheckpointSpec(vision_depth=0))


@pytest.mark.parametrize("what", KINDS)
def test_weights_of_another_kind(checkpoint: Path, what: str) -> None:
    for file in checkpoint.glob("*.safetensors"):
        file.write_bytes(KINDS[what])
    with pytest.raises(CheckpointError, match=what) as caught:
        load_model(checkpoint, torch.float32, "cpu")
    assert ".safetensors is a" in caught.value.message


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_of_another_kind(checkpoint: Path, name: str, what: str) -> None:
    (checkpoint / name).write_bytes(KINDS[what])
    with pytest.raises(CheckpointError, match=what) as caught:
        read_spec(checkpoint)
    assert caught.value.message.startswith(f"{name} is a")


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_of_another_kind(checkpoint: Path, name: str, what: str) -> None:
    (checkpoint / name).write_bytes(KINDS[what])
    with pytest.raises(CheckpointError, match=what) as caught:
        Tokenizer(checkpoint)
    assert caught.value.message.startswith(f"{name} is a")


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03")
    with pytest.raises(CheckpointError, match=r"model\.gguf is damaged: the header reaches beyond"):
        resolve_checkpoint(str(file))
    file.write_bytes(b"{}")
    with pytest.raises(ModelNotFoundError, match="is a file: name the folder"):
        resolve_checkpoint(file)


@pytest.mark.parametrize("left", [True, False])
def test_a_folder_of_other_weights(checkpoint: Path, left: bool) -> None:
    (checkpoint / "pytorch_model.bin").write_bytes(b"PK")
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    if not left:
        (checkpoint / "config.json").unlink()
    missing = "safetensors files" if left else "config.json"
    with pytest.raises(CheckpointError, match=f"no {missing}; pytorch_model.bin is of a kind"):
        load_model(checkpoint, torch.float32, "cpu")


def test_a_hub_id_of_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GGUF files beside safetensors have no effect."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model-Q4_K_M.gguf").touch()
    assert resolve_checkpoint("some/model-GGUF") == tmp_path
