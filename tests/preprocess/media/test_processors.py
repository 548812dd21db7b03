"""Resize, normalise and patchify against transformers' torchvision-backed processors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlm_serve.errors import CheckpointError, MediaError
from vlm_serve.preprocess.media.frames import ArrayVideo
from vlm_serve.preprocess.media.images import image_to_rgb
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.media.loading import LoadedMedia
from vlm_serve.preprocess.media.part_options import ImageOptions, VideoOptions
from vlm_serve.preprocess.media.processing import (
    Processed,
    image_size,
    process_image,
    process_video,
    video_size,
)
from vlm_serve.preprocess.media.processors import (
    PixelConfig,
    VideoConfig,
    check_fit,
    fingerprint,
    image_config,
    video_config,
)
from vlm_serve.preprocess.media.sampling import uniform_indices
from vlm_serve.system.stopping import Stop

LIMITS = MediaLimits()
IMAGE = {"image_processor_type": "Qwen2VLImageProcessor"}
VIDEO = {"video_processor_type": "Qwen3VLVideoProcessor", "cap_pixels_per_frame": False}
SMALL = {"size": {"shortest_edge": 4096, "longest_edge": 65536}, "patch_size": 16}


def write(folder: Path, image: dict[str, Any] | None, video: dict[str, Any] | None) -> Path:
    folder.mkdir(exist_ok=True)
    if image is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
    if video is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return folder


def image_oracle(folder: Path) -> Any:
    oracle.prepare_torchvision()
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor.from_pretrained(str(folder))


def video_oracle(folder: Path) -> Any:
    oracle.prepare_torchvision()
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    return Qwen3VLVideoProcessor.from_pretrained(str(folder))


def patches(processed: Processed, config: PixelConfig) -> torch.Tensor:
    def never(stop: Stop) -> Processed:
        raise AssertionError

    item = LoadedMedia(processed.record, config, processed)
    whole = torch.cat([item.patches(patch) for patch in range(item.grid[0])])
    if config.do_rescale and config.do_normalize:
        assert torch.equal(_looked_up(item), whole), "a table has the bits"
    else:
        assert item.coded(0) is None, "its values are no bytes, or not of a channel"
    return whole


def _looked_up(item: LoadedMedia) -> torch.Tensor:
    """The same by bytes and a table of values."""
    found = []
    for patch in range(item.grid[0]):
        coded = item.coded(patch)
        assert coded is not None and coded[0].dtype == torch.uint8
        places = coded[0].view(len(coded[0]), 3, -1).long()
        found.append(coded[1][torch.arange(3)[:, None], places].flatten(1))
    return torch.cat(found)


def options_of(config: VideoConfig) -> VideoOptions:
    return VideoOptions(
        fps=None,
        sampling="uniform",
        sample_fps=config.sample_fps,
        num_frames=None,
        max_frames=config.max_frames,
        max_frame_pixels=0,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
    )


def run_image(pixels: npt.NDArray[np.uint8], config: PixelConfig) -> Processed:
    return process_image(pixels, ImageOptions(config.min_pixels, config.max_pixels), config)


IMAGE_CONFIGS = [
    IMAGE,
    IMAGE | SMALL,
    IMAGE | SMALL | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_size": 1},
    IMAGE | {"min_pixels": 100 * 100, "max_pixels": 200 * 200, "temporal_patch_size": 3},
    IMAGE | SMALL | {"resample": 2, "rescale_factor": 0.01},
    IMAGE | SMALL | {"do_normalize": False},
    IMAGE | SMALL | {"do_rescale": False},
]


@pytest.mark.parametrize("raw", IMAGE_CONFIGS)
def test_photographs_equal_transformers_bit_for_bit(
    raw: dict[str, Any], tmp_path: Path, photographs: Path
) -> None:
    folder = write(tmp_path / "c", raw, None)
    config = image_config(folder)
    assert config is not None
    reference = image_oracle(folder)
    for name in ("astronaut.png", "rocket.jpg", "camera.png", "horse.png"):
        with Image.open(photographs / name) as image:
            expected = reference(image, return_tensors="pt")
            done = run_image(image_to_rgb(image, LIMITS), config)
        assert list(done.record.grid) == expected["image_grid_thw"][0].tolist()
        assert torch.equal(patches(done, config), expected["pixel_values"])


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (3, 500), (31, 33), (700, 9), (256, 256)])
def test_odd_sizes_equal_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    folder = write(tmp_path / "c", IMAGE | SMALL, None)
    config = image_config(folder)
    assert config is not None
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    expected = image_oracle(folder)(Image.fromarray(pixels), return_tensors="pt")
    done = run_image(pixels, config)
    assert list(done.record.grid) == expected["image_grid_thw"][0].tolist()
    assert torch.equal(patches(done, config), expected["pixel_values"])


VIDEO_CONFIGS = [
    VIDEO | {"size": {"shortest_edge": 8192, "longest_edge": 1 << 19}},
    VIDEO | {"size": {"shortest_edge": 8192, "longest_edge": 1 << 19}, "fps": 7, "max_frames": 9},
    VIDEO
    | {
        "size": {"shortest_edge": 8192, "longest_edge": 1 << 20},
        "cap_pixels_per_frame": True,
        "max_video_tokens": 24,
        "fps": 3,
    },
    VIDEO
    | {
        "size": {"shortest_edge": 8192, "longest_edge": 1 << 19},
        "fps": None,
        "num_frames": 7,
        "temporal_patch_size": 3,
        "patch_size": 8,
        "image_mean": [0.1, 0.2, 0.3],
    },
    VIDEO | {"size": {"shortest_edge": 8192, "longest_edge": 1 << 19}, "do_sample_frames": False},
]


@pytest.mark.parametrize("raw", VIDEO_CONFIGS)
@pytest.mark.parametrize("shape", [(2, 40, 60), (29, 96, 130), (60, 20, 300)])
def test_videos_equal_transformers_bit_for_bit(
    raw: dict[str, Any], shape: tuple[int, int, int], tmp_path: Path
) -> None:
    folder = write(tmp_path / "c", None, raw)
    config = video_config(folder)
    assert config is not None
    frames = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    reference = video_oracle(folder)
    for fps in (12.5, 30.0):
        metadata = {
            "total_num_frames": len(frames),
            "fps": fps,
            "frames_indices": list(range(len(frames))),
        }
        expected = reference(
            frames, video_metadata=[metadata], return_tensors="pt", return_metadata=True
        )
        done = process_video(ArrayVideo(frames, fps, LIMITS), options_of(config), config)
        assert list(done.record.grid) == expected["video_grid_thw"][0].tolist()
        assert torch.equal(patches(done, config), expected["pixel_values_videos"])
        assert len(done.record.times) == len(done.record.hashes) == done.record.grid[0]


sides = st.integers(1, 5000)
bounds = st.integers(1, 1 << 12).flatmap(
    lambda low: st.tuples(st.just(low << 8), st.integers(low << 8, 1 << 25))
)


@given(sides, sides, st.sampled_from([16, 28, 32]), bounds)
def test_image_sizes_equal_transformers(
    height: int, width: int, factor: int, pixels: tuple[int, int]
) -> None:
    oracle.prepare_torchvision()
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    low, high = pixels
    try:
        expected = smart_resize(height, width, factor, low, high)
    except ValueError:
        with pytest.raises(MediaError, match="aspect ratio"):
            image_size(height, width, factor=factor, min_pixels=low, max_pixels=high)
        return
    size = image_size(height, width, factor=factor, min_pixels=low, max_pixels=high)
    assert size == expected


@given(
    st.integers(2, 768), sides, sides, st.sampled_from([16, 32]), st.sampled_from([1, 2, 3]), bounds
)
def test_video_sizes_equal_transformers(
    num_frames: int,
    height: int,
    width: int,
    factor: int,
    temporal: int,
    pixels: tuple[int, int],
) -> None:
    oracle.prepare_torchvision()
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    low, high = pixels
    given: dict[str, Any] = {"num_frames": num_frames, "factor": factor}
    given |= {"temporal_factor": temporal, "min_pixels": low, "max_pixels": high}
    try:
        expected = smart_resize(height=height, width=width, **given)
    except ValueError as error:
        if "aspect" in str(error):
            with pytest.raises(MediaError, match="aspect ratio"):
                video_size(height, width, **given)
        return
    assert video_size(height, width, **given) == expected


@given(
    st.integers(1, 20_000),
    st.sampled_from([5.0, 23.976, 24.0, 25.0, 29.97, 60.0]),
    st.sampled_from([0.5, 1.0, 2.0, 24.0]),
    st.sampled_from([(4, 768), (1, 8), (16, 16)]),
)
def test_sampled_frames_equal_transformers(
    total: int, fps: float, sample_fps: float, frames: tuple[int, int]
) -> None:
    oracle.prepare_torchvision()
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    low, high = frames
    reference = Qwen3VLVideoProcessor(min_frames=low, max_frames=high, cap_pixels_per_frame=False)
    expected = reference.sample_frames(VideoMetadata(total, fps=fps), fps=sample_fps)
    found = uniform_indices(total, fps, sample_fps=sample_fps, min_frames=low, max_frames=high)
    assert found == expected.tolist()


def test_a_single_frame_fills_its_patch(tmp_path: Path) -> None:
    """transformers refuses such a video; here the frame is repeated, as at an odd end."""
    config = video_config(write(tmp_path / "c", None, VIDEO_CONFIGS[0]))
    assert config is not None
    frame = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    one = process_video(ArrayVideo(frame, None, LIMITS), options_of(config), config)
    two = process_video(
        ArrayVideo(np.repeat(frame, 2, axis=0), None, LIMITS), options_of(config), config
    )
    assert one.record.grid == two.record.grid
    assert one.record.hashes == two.record.hashes
    assert torch.equal(patches(one, config), patches(two, config))


def test_configs_nested_in_processor_config(tmp_path: Path) -> None:
    nested = {
        "image_processor": IMAGE | SMALL | {"merge_size": 4},
        "video_processor": VIDEO | SMALL | {"fps": 5, "merge_size": 4},
    }
    folder = write(tmp_path / "c", IMAGE, VIDEO)
    (folder / "processor_config.json").write_text(json.dumps(nested))
    images, videos = image_config(folder), video_config(folder)
    assert images is not None and videos is not None
    assert (images.merge_size, images.max_pixels) == (4, 65536)
    assert (videos.merge_size, videos.sample_fps) == (4, 5)
    assert image_oracle(folder).merge_size == 4
    assert video_oracle(folder).fps == 5


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", IMAGE, VIDEO)
    images, videos = image_config(folder), video_config(folder)
    assert images is not None and videos is not None
    for config, reference in ((images, image_oracle(folder)), (videos, video_oracle(folder))):
        for ours, theirs in {
            "patch_size": "patch_size",
            "temporal_patch_size": "temporal_patch_size",
            "merge_size": "merge_size",
            "do_resize": "do_resize",
            "resample": "resample",
            "rescale_factor": "rescale_factor",
        }.items():
            assert getattr(config, ours) == getattr(reference, theirs), ours
        assert list(config.mean) == list(reference.image_mean)
        assert list(config.std) == list(reference.image_std)
        assert config.min_pixels == reference.size["shortest_edge"]
        assert config.max_pixels == reference.size["longest_edge"]
    reference = video_oracle(folder)
    assert (videos.sample_fps, videos.min_frames) == (reference.fps, reference.min_frames)
    assert (videos.max_frames, videos.num_frames) == (reference.max_frames, reference.num_frames)
    assert videos.max_video_tokens == reference.max_video_tokens


def test_no_config_means_no_processor(tmp_path: Path) -> None:
    assert image_config(tmp_path) is None
    assert video_config(tmp_path) is None


@pytest.mark.parametrize("raw", [{"resample": 1}, {"fps": 2, "num_frames": 3}])
def test_unsupported_settings_are_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        video_config(write(tmp_path / "c", None, VIDEO | raw))


@pytest.mark.parametrize("name", ["patch_size", "temporal_patch_size", "merge_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "16", None])
def test_sizes_that_cannot_be_are_named(name: str, value: object, tmp_path: Path) -> None:
    for config in (image_config, video_config):
        folder = write(tmp_path / config.__name__, IMAGE | {name: value}, VIDEO | {name: value})
        with pytest.raises(CheckpointError, match=f"{name} of the processor config .* {value!r}"):
            config(folder)


def test_processors_cut_the_patches_that_the_tower_takes(checkpoint: Path) -> None:
    images, videos = image_config(checkpoint), video_config(checkpoint)
    vision = json.loads((checkpoint / "config.json").read_text())["vision_config"]
    check_fit(vision, images, videos, None)
    for name in ("patch_size", "temporal_patch_size", "spatial_merge_size"):
        with pytest.raises(CheckpointError, match=f"but {name} in config.json is 7"):
            check_fit(vision | {name: 7}, images, videos)


def test_without_resize_sides_must_fit(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", IMAGE | SMALL | {"do_resize": False}, None)
    config = image_config(folder)
    assert config is not None
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    expected = image_oracle(folder)(Image.fromarray(pixels), return_tensors="pt")
    assert torch.equal(patches(run_image(pixels, config), config), expected["pixel_values"])
    with pytest.raises(MediaError, match="multiples of 32"):
        run_image(pixels[:-1], config)


def test_fingerprint_changes_with_every_setting(checkpoint: Path) -> None:
    images, videos = image_config(checkpoint), video_config(checkpoint)
    assert images is not None and videos is not None
    seen = {fingerprint(images, videos), fingerprint(images, None), fingerprint(None, videos)}
    for field in dataclasses.fields(VideoConfig):
        value = getattr(videos, field.name)
        other: Any = 12345
        if isinstance(value, bool | tuple):
            other = not value if isinstance(value, bool) else (9.0, 9.0, 9.0)
        seen.add(fingerprint(images, dataclasses.replace(videos, **{field.name: other})))
    assert len(seen) == 3 + len(dataclasses.fields(VideoConfig))
