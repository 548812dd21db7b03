"""A fingerprint follows the content, is remembered, and never depends on the memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from other_user import mode, umask
from safetensors.torch import load_file, save_file

from vlm_serve.errors import CheckpointError
from vlm_serve.models import identity as module
from vlm_serve.models import load_model
from vlm_serve.models.identity import digests_of, fingerprint, tensor_digest

SPEC = CheckpointSpec(num_layers=1, vision_depth=0, shards=2)
LONG_AGO = 1_600_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = make_checkpoint(tmp_path / "model", SPEC)
    for file in path.glob("*.safetensors"):
        os.utime(file, (LONG_AGO, LONG_AGO))
    return path


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vlm-serve" / "tensor-digests.json"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were really read."""
    names: list[str] = []
    original = module._hashed

    def hash_file(path: str, *opened: Any) -> Any:
        names.append(Path(path).name)
        return original(path, *opened)

    monkeypatch.setattr(module, "_hashed", hash_file)
    return names


def test_files_are_hashed_once(path: Path, memory: Path, hashed: list[str]) -> None:
    first = fingerprint(path)
    assert len(first) == 32 and len(hashed) == 2
    assert fingerprint(path) == first
    assert len(hashed) == 2
    assert len(json.loads(memory.read_text())) == 2
    assert fingerprint(path / ".." / "model") == first
    assert len(hashed) == 2


def test_changed_content_is_noticed(path: Path, memory: Path, hashed: list[str]) -> None:
    first = fingerprint(path)
    shard = path / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.utime(shard, (LONG_AGO + 1, LONG_AGO + 1))
    assert fingerprint(path) != first
    assert hashed[2:] == [shard.name]


def test_a_file_just_written_is_not_remembered(path: Path, memory: Path, hashed: list[str]) -> None:
    for file in path.glob("*.safetensors"):
        os.utime(file)
    assert fingerprint(path) == fingerprint(path)
    assert len(hashed) == 4
    assert not memory.exists()


def test_equal_content_elsewhere_is_equal(path: Path, memory: Path, tmp_path: Path) -> None:
    assert fingerprint(make_checkpoint(tmp_path / "other", SPEC)) == fingerprint(path)


def test_the_config_counts_but_not_who_wrote_it(path: Path, memory: Path) -> None:
    first = fingerprint(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"transformers_version": "6"}))
    assert fingerprint(path) == first
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert fingerprint(path) != first


@pytest.mark.parametrize("content", ["{", "[]", '{"/x": 1}', '{"/x": [1, 2, "zz"]}'])
def test_a_damaged_memory_is_replaced(path: Path, memory: Path, content: str) -> None:
    expected = fingerprint(path)
    memory.write_text(content)
    assert fingerprint(path) == expected
    assert len(json.loads(memory.read_text())) == 2


def test_an_unwritable_memory_does_no_harm(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    assert fingerprint(path) == fingerprint(path)
    assert len(hashed) == 4


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022])
def test_the_memory_is_this_users_alone(path: Path, memory: Path, mask: int) -> None:
    with umask(mask):
        fingerprint(path)
    assert mode(memory) == 0o600 and mode(memory.parent) == 0o700


@pytest.mark.parametrize("permissions", [0o666, 0o664, 0o646])
def test_a_memory_that_others_could_write_is_not_believed(
    path: Path, memory: Path, hashed: list[str], permissions: int
) -> None:
    """They could make one checkpoint pass for another, and its cache entries for that one's."""
    right = fingerprint(path)
    content = json.loads(memory.read_text())
    memory.write_text(
        json.dumps({key: [*value[:2], "0" * len(value[2])] for key, value in content.items()})
    )
    memory.chmod(permissions)
    hashed.clear()
    assert fingerprint(path) == right and len(hashed) == 2
    assert mode(memory) == 0o600
    assert fingerprint(path) == right and len(hashed) == 2


def test_nothing_is_remembered_where_others_may_write(
    path: Path, memory: Path, hashed: list[str]
) -> None:
    fingerprint(path)
    memory.parents[1].chmod(0o777)
    before = memory.read_bytes()
    hashed.clear()
    for _ in range(2):
        fingerprint(path)
    assert len(hashed) == 4 and memory.read_bytes() == before


def test_no_home_directory(path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]) -> None:
    def home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert fingerprint(path) == fingerprint(path)
    assert len(hashed) == 4


def test_unreadable_files_are_named(path: Path, memory: Path) -> None:
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        fingerprint(path)


def test_how_tensors_are_cut_into_files_does_not_count(path: Path, memory: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    whole = fingerprint(path)
    memory_digests = {name: tensor_digest(name, tensor) for name, tensor in tensors.items()}
    assert memory_digests == digests_of(path)
    assert fingerprint(path, digests=memory_digests) == whole
    for file in path.glob("model*"):
        file.unlink()
    save_file(tensors, path / "model.safetensors")
    assert fingerprint(path) == whole


def test_each_part_of_a_tensor_counts() -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    others = (tensor.view(3, 2), tensor.view(torch.float16), tensor + 1, tensor.T.contiguous())
    digests = {tensor_digest("a", each) for each in (tensor, *others)}
    assert len(digests | {tensor_digest("b", tensor)}) == 6
    assert tensor_digest("a", tensor.T) == tensor_digest("a", tensor.T.contiguous())
    assert len(tensor_digest("a", torch.tensor(1.0))) == 32


def test_the_tower_has_an_identity_of_its_own(tmp_path: Path, memory: Path) -> None:
    """The language model does not count for it."""
    path = make_checkpoint(tmp_path / "seeing", CheckpointSpec(num_layers=1))
    file = path / "model.safetensors"
    found = []
    for changed in (None, "norm.weight", "visual.patch_embed.proj.weight"):
        tensors = load_file(file)
        name = next((name for name in tensors if changed and name.endswith(changed)), None)
        if name is not None:
            tensors[name] = tensors[name] + 1
        save_file(tensors, file)
        model = load_model(path, torch.float32, "cpu")
        found.append((model.fingerprint, model.tower_fingerprint))
        assert all("visual" in name for name in model.tower_names) and model.tower_names
    (whole, tower), text, seeing = found
    assert text[0] != whole and text[1] == tower
    assert seeing[0] != text[0] and seeing[1] != tower
