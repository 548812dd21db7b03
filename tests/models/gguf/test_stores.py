"""Models that Ollama and LM Studio have downloaded are found by their names there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_spec import CheckpointSpec
from gguf_writer import write_model, write_tower, write_whole
from make_checkpoint import make_checkpoint

from vlm_serve.errors import CheckpointError, ConfigError, ModelNotFoundError
from vlm_serve.models import read_spec, resolve_checkpoint
from vlm_serve.models.gguf.folder import gguf_files

_KIND = "application/vnd.ollama.image."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    checkpoint = make_checkpoint(folder / "model", CheckpointSpec(gdn_value_heads=4))
    write_whole(checkpoint, folder / "whole.gguf")
    write_model(checkpoint, folder / "text.gguf")
    write_tower(checkpoint, folder / "tower.gguf")
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr("vlm_serve.models.gguf.stores._SERVICE", str(tmp_path / "service"))
    return tmp_path


def pulled(models: Path, name: str, **layers: Path) -> Path:
    """Write what `ollama pull` leaves: a manifest, and a blob for each layer."""
    entries = []
    for number, (kind, source) in enumerate(layers.items()):
        digest = f"{name.encode().hex():0>62}{number:02}"[-64:]
        blob = models / "blobs" / f"sha256-{digest}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, blob)
        entries.append({"mediaType": _KIND + kind, "digest": f"sha256:{digest}", "size": 1})
    manifest = models / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": entries}))
    return manifest


def test_ollamas(made: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = home / ".ollama/models"
    pulled(models, "registry.ollama.ai/library/qwen3.5/4b", model=made / "whole.gguf")
    apart = {"model": made / "text.gguf", "projector": made / "tower.gguf"}
    pulled(models, "registry.ollama.ai/me/mine/latest", **apart)
    pulled(models, "hf.co/unsloth/Qwen3.5-GGUF/Q4_K_M", **apart)
    for name in ("qwen3.5:4b", "me/mine", "hf.co/unsloth/Qwen3.5-GGUF:Q4_K_M"):
        assert read_spec(resolve_checkpoint(f"ollama:{name}")).vision is not None, name
        blind = resolve_checkpoint(f"ollama:{name}", tower="none")
        assert read_spec(blind).vision is None, name
    files = gguf_files(resolve_checkpoint("ollama:qwen3.5:4b", tower=str(made / "tower.gguf")))
    assert files is not None and files.tower == made / "tower.gguf"
    with pytest.raises(ModelNotFoundError) as missing:
        resolve_checkpoint("ollama:qwen3.5")
    told = "it has hf.co/unsloth/Qwen3.5-GGUF:Q4_K_M, me/mine:latest, qwen3.5:4b"
    assert str(missing.value).startswith("Ollama has no model 'qwen3.5:latest' in ")
    assert str(missing.value).endswith(told)
    with pytest.raises(ConfigError, match="has no effect"):
        resolve_checkpoint("ollama:qwen3.5:4b", revision="main")
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    with pytest.raises(ModelNotFoundError, match=r"elsewhere; it has none at all"):
        resolve_checkpoint("ollama:qwen3.5:4b")


def test_ollamas_that_are_broken(made: Path, home: Path) -> None:
    models = home / "service"
    manifest = pulled(models, "registry.ollama.ai/library/a/latest", model=made / "text.gguf")
    assert gguf_files(resolve_checkpoint("ollama:a")) is not None
    next((models / "blobs").iterdir()).unlink()
    with pytest.raises(CheckpointError, match="Ollama's model a is not complete: pull it again"):
        resolve_checkpoint("ollama:a")
    for content in ("", "[]", '{"layers": 3}', '{"layers": [{}]}', "[" * 100_000):
        manifest.write_text(content)
        with pytest.raises(CheckpointError, match="Ollama's manifest of a cannot be read"):
            resolve_checkpoint("ollama:a")


@pytest.mark.parametrize("name", ["ollama:", "ollama:../x", "ollama:a/b/c/d", "lmstudio:a/../b"])
def test_names_that_are_none(name: str, home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is neither a directory nor a Hugging Face hub"):
        resolve_checkpoint(name)


def test_lm_studios(made: Path, home: Path) -> None:
    old, new = home / ".cache/lm-studio/models", home / ".lmstudio/models"
    for root, name, files in (
        (old, "unsloth/Tiny-GGUF", ("text.gguf", "Tiny-Q8_0.gguf")),
        (new, "lmstudio-community/Tiny-GGUF", ("text.gguf", "Tiny-Q4_K_M.gguf")),
    ):
        (root / name).mkdir(parents=True)
        shutil.copy(made / files[0], root / name / files[1])
    shutil.copy(made / "tower.gguf", new / "lmstudio-community/Tiny-GGUF/mmproj-F16.gguf")
    assert read_spec(resolve_checkpoint("lmstudio:unsloth/Tiny-GGUF:Q8_0")).vision is None
    folder = resolve_checkpoint("lmstudio:lmstudio-community/Tiny-GGUF")
    assert read_spec(folder).vision is not None
    with pytest.raises(ModelNotFoundError, match="no GGUF file of type Q6_K; it has Tiny-Q8_0"):
        resolve_checkpoint("lmstudio:unsloth/Tiny-GGUF:Q6_K")
    told = r"it has lmstudio-community/Tiny-GGUF, unsloth/Tiny-GGUF$"
    for name in ("nobody/Tiny-GGUF", "unsloth"):
        with pytest.raises(ModelNotFoundError, match=told):
            resolve_checkpoint(f"lmstudio:{name}")
