"""The files of a model are found: split ones, a vision tower beside it, those of a hub id."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_spec import CheckpointSpec
from gguf_writer import split, write_model, write_tower
from make_checkpoint import make_checkpoint

from vlm_serve.errors import CheckpointError, ConfigError, ModelNotFoundError
from vlm_serve.models import read_spec, resolve_checkpoint
from vlm_serve.models.gguf.folder import gguf_files, open_tensors
from vlm_serve.models.identity import fingerprint


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's file and its tower's."""
    folder = tmp_path_factory.mktemp("made")
    checkpoint = make_checkpoint(folder / "Tiny", CheckpointSpec())
    write_model(checkpoint, folder / "Tiny-Q8_0.gguf")
    write_tower(checkpoint, folder / "mmproj-F32.gguf")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    for file in made.glob("*.gguf"):
        shutil.copy(file, tmp_path)
    return tmp_path


def tower_of(model: Path, **options: Any) -> str | None:
    found = gguf_files(resolve_checkpoint(model, **options))
    assert found is not None
    return None if found.tower is None else found.tower.name


def with_basename(source: Path, target: Path, name: str) -> None:
    """A copy of a file that says it was made from another model."""
    old, new = b"Tiny", name.encode()
    assert len(old) == len(new)
    target.write_bytes(source.read_bytes().replace(old, new, 1))


def test_a_tower_beside_the_model(folder: Path) -> None:
    model = folder / "Tiny-Q8_0.gguf"
    assert tower_of(model) == tower_of(folder) == "mmproj-F32.gguf"
    assert read_spec(resolve_checkpoint(model)).vision is not None
    assert tower_of(model, tower="none") is None
    assert read_spec(resolve_checkpoint(model, tower="none")).vision is None
    shutil.copy(folder / "mmproj-F32.gguf", folder / "Tiny.mmproj-BF16.gguf")
    assert tower_of(model) == "Tiny.mmproj-BF16.gguf"
    assert tower_of(model, tower=str(folder / "mmproj-F32.gguf")) == "mmproj-F32.gguf"


def test_towers_of_other_models(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A tower of a model of another name is taken only where there is no choice."""
    model, tower = folder / "Tiny-Q8_0.gguf", folder / "mmproj-F32.gguf"
    with_basename(tower, folder / "mmproj-BF16.gguf", "Else")
    assert tower_of(model) == "mmproj-F32.gguf"
    tower.unlink()
    assert tower_of(model) == "mmproj-BF16.gguf"
    with_basename(model, folder / "Else-Q8_0.gguf", "Also")
    assert tower_of(model) is None
    with pytest.raises(ModelNotFoundError, match=r"several models, name one: Else-Q8_0\.gguf, T"):
        resolve_checkpoint(folder)
    wide = make_checkpoint(tmp_path_factory.mktemp("wide") / "Wide", CheckpointSpec(hidden_size=96))
    write_tower(wide, folder / "mmproj-BF16.gguf")
    with pytest.raises(CheckpointError, match="its embeddings have 96 numbers, the model's 64"):
        resolve_checkpoint(model, tower=str(folder / "mmproj-BF16.gguf"))


def test_a_tower_without_use(folder: Path, tmp_path: Path) -> None:
    model, tower = str(folder / "Tiny-Q8_0.gguf"), str(folder / "mmproj-F32.gguf")
    with pytest.raises(CheckpointError, match="is a vision tower: name the model's file"):
        resolve_checkpoint(tower)
    with pytest.raises(CheckpointError, match="Tiny-Q8_0.gguf is no vision tower"):
        resolve_checkpoint(model, tower=model)
    with pytest.raises(ConfigError, match="mmproj '/no/such' is no file"):
        resolve_checkpoint(model, tower="/no/such")
    older = tmp_path / "mmproj-older.gguf"
    older.write_bytes(Path(tower).read_bytes().replace(b"qwen3vl_merger", b"qwen2vl_merger"))
    with pytest.raises(CheckpointError, match="of another kind, 'qwen2vl_merger'; only 'qwen3vl"):
        resolve_checkpoint(model, tower=str(older))
    spec = CheckpointSpec(family="qwen3_next", vision_depth=0, num_experts=4)
    text = write_model(make_checkpoint(tmp_path / "next", spec), tmp_path / "next.gguf")
    with pytest.raises(CheckpointError, match="next.gguf is a model of text"):
        resolve_checkpoint(text, tower=tower)
    with pytest.raises(ConfigError, match="has no effect: the model is no GGUF file"):
        resolve_checkpoint(tmp_path / "next", tower=tower)


def test_a_split_model(folder: Path) -> None:
    whole = folder / "Tiny-Q8_0.gguf"
    parts = split(whole, 3)
    alone = gguf_files(resolve_checkpoint(whole, tower="none"))
    assert alone is not None
    names = set(open_tensors(alone).names())
    for part in parts:
        found = gguf_files(resolve_checkpoint(part, tower="none"))
        assert found is not None and list(found.parts) == parts
        assert set(open_tensors(found).names()) == names
    whole.unlink()
    assert tower_of(folder) == "mmproj-F32.gguf"
    renamed = parts[1].rename(folder / "part.gguf")
    with pytest.raises(CheckpointError, match="whose Tiny-Q8_0-00002-of-00003.gguf is missing"):
        resolve_checkpoint(parts[0])
    with pytest.raises(CheckpointError, match="is part 2 of 3 by its metadata"):
        resolve_checkpoint(renamed)
    shutil.copy(parts[0], parts[1])
    with pytest.raises(CheckpointError, match="is part 1 of 3 by its metadata"):
        resolve_checkpoint(parts[0])


def test_the_identity_of_a_model(folder: Path) -> None:
    """It follows from both files, not from their names."""
    model, tower = folder / "Tiny-Q8_0.gguf", folder / "mmproj-F32.gguf"
    whole = fingerprint(resolve_checkpoint(model))
    assert fingerprint(resolve_checkpoint(model, tower="none")) != whole
    renamed = model.rename(folder / "other.gguf")
    assert fingerprint(resolve_checkpoint(renamed)) == whole
    content = bytearray(tower.read_bytes())
    content[-1] ^= 1
    tower.write_bytes(content)
    assert fingerprint(resolve_checkpoint(renamed)) != whole


class Hub:
    """A hub with one id; `online` or not."""

    def __init__(self, root: Path, files: dict[str, Path]) -> None:
        self.root, self.files, self.online = root, files, True
        self.fetched: list[str] = []

    def list_repo_files(self, name: str, revision: str | None = None) -> list[str]:
        if not self.online:
            raise ConnectionError
        return list(self.files)

    def snapshot_download(self, name: str, **options: Any) -> str:
        if not self.online or options.get("local_files_only"):
            if not self.root.is_dir():
                raise ConnectionError
            return str(self.root)
        for pattern in options["allow_patterns"]:
            if pattern in self.files and not (self.root / pattern).exists():
                (self.root / pattern).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.files[pattern], self.root / pattern)
                self.fetched.append(pattern)
        self.root.mkdir(exist_ok=True)
        return str(self.root)


@pytest.fixture
def hub(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    model, tower = made / "Tiny-Q8_0.gguf", made / "mmproj-F32.gguf"
    names = ("Tiny-Q4_K_M.gguf", "Tiny-UD-Q4_K_M.gguf", "Q8_0/Tiny-Q8_0.gguf", "Tiny-IQ4_XS.gguf")
    files = dict.fromkeys(names, model) | dict.fromkeys(
        ("mmproj-F16.gguf", "mmproj-F32.gguf"), tower
    )
    hub = Hub(tmp_path / "hub", files | {"README.md": model})
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    return hub


def test_hub_names(hub: Hub) -> None:
    found = gguf_files(resolve_checkpoint("some/Tiny-GGUF:q4_k_m"))
    assert found is not None and found.tower is not None
    assert [each.name for each in found.every] == ["Tiny-Q4_K_M.gguf", "mmproj-F16.gguf"]
    assert hub.fetched == ["Tiny-Q4_K_M.gguf", "mmproj-F16.gguf"]
    assert resolve_checkpoint("some/Tiny-GGUF") == resolve_checkpoint("some/Tiny-GGUF:Q4_K_M")
    for kind, name in (("UD-Q4_K_M", "Tiny-UD-Q4_K_M.gguf"), ("Q8_0", "Tiny-Q8_0.gguf")):
        own = gguf_files(resolve_checkpoint(f"some/Tiny-GGUF:{kind}"))
        assert own is not None and own.parts[0].name == name
    hub.online = False
    assert resolve_checkpoint("some/Tiny-GGUF:q8_0", tower="none").is_dir()
    with pytest.raises(ModelNotFoundError, match="no GGUF file of type Q2_K; it has Tiny-Q8_0, "):
        resolve_checkpoint("some/Tiny-GGUF:Q2_K")


def test_hub_names_that_are_not_here(hub: Hub) -> None:
    with pytest.raises(ModelNotFoundError, match="is not downloaded yet"):
        resolve_checkpoint("some/Tiny-GGUF:Q8_0", configs_only=True)
    hub.online = False
    with pytest.raises(ModelNotFoundError, match="the hub could not be reached"):
        resolve_checkpoint("some/Tiny-GGUF:Q8_0")
    hub.online, hub.files = True, {"README.md": Path()}
    with pytest.raises(ModelNotFoundError, match="neither safetensors nor GGUF files"):
        resolve_checkpoint("some/Tiny:Q8_0")
