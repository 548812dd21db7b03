"""Resizes, normalises and cuts into patches, driven by the checkpoint's processor configs.

The arithmetic is that of transformers' torchvision-backed `Qwen2VLImageProcessor` and
`Qwen3VLVideoProcessor`: antialiased interpolation of uint8, then rescale and normalise in one step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from vlm_serve.errors import CheckpointError
from vlm_serve.preprocess.identity.keys import tagged
from vlm_serve.preprocess.text.tokenizer import read_json

_VERSION = "1"
_BILINEAR, _BICUBIC = 2, 3
_MODES = {_BILINEAR: "bilinear", _BICUBIC: "bicubic"}


MERGES = {"16x": 4, "4x": 2}
"""Patches per side that become one token, by `downsample_mode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureConfig:
    """Settings common to all processors: from pixels of the right size to patches.

    Attributes:
        merge_size: patches per side of the squares that determine the patch order.
        resample: Pillow's number of the interpolation.
        mean, std: per channel, of samples scaled to 0 … 1.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    do_resize: bool
    resample: int
    do_rescale: bool
    rescale_factor: float
    do_normalize: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the (h, w) of a resized picture in patches."""
        return height // self.patch_size, width // self.patch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelConfig(PictureConfig):
    """Settings for pictures that are seen whole. Defaults are transformers'.

    Attributes:
        min_pixels, max_pixels: area of an image, or of all frames of a video together.
    """

    min_pixels: int
    max_pixels: int

    @property
    def factor(self) -> int:
        """Both sides are multiples of this many pixels."""
        return self.patch_size * self.merge_size

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of placeholder tokens of one resized picture."""
        rows, columns = self.grid(height, width)
        return rows * columns // self.merge_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoConfig(PixelConfig):
    """Settings of a video processor.

    Attributes:
        sample_fps: frames taken per second of video; None: `num_frames` decides.
        num_frames: frames taken of any video; None: `sample_fps` decides.
        min_frames, max_frames: bounds on the number of frames sampled at `sample_fps`.
        do_sample_frames: False takes every frame.
        cap_pixels_per_frame: cap a frame's share of `max_pixels`.
        max_video_tokens: that cap, in tokens.
    """

    sample_fps: float | None
    num_frames: int | None
    min_frames: int
    max_frames: int
    do_sample_frames: bool
    cap_pixels_per_frame: bool
    max_video_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameVideoConfig(VideoConfig):
    """Settings of a video processor whose `min_pixels` and `max_pixels` are those of a frame, and
    which takes whole temporal patches, evenly apart (transformers' `Qwen2VLVideoProcessor`).

    Attributes:
        max_video_tokens: with `cap_pixels_per_frame`, nine tenths of them bound the whole video.
    """

    @property
    def whole_pixels(self) -> int:
        """The area of all frames together that so many tokens stand for."""
        return int(self.max_video_tokens * self.factor**2 * 0.9) * self.temporal_patch_size


_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)


def _image_fields(directory: Path | str) -> dict[str, Any]:
    """Return the image processor's fields in the checkpoint's files; {} if it has none."""
    directory = Path(directory)
    raw = read_json(directory / "processor_config.json").get("image_processor")
    return raw or read_json(directory / "preprocessor_config.json")


def _video_fields(directory: Path | str) -> dict[str, Any]:
    """Return the video processor's fields in the checkpoint's files; {} if it has none."""
    directory = Path(directory)
    raw = read_json(directory / "processor_config.json").get("video_processor")
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        raw = raw or read_json(directory / name)
    return raw or {}


def image_config(directory: Path | str) -> PixelConfig | None:
    """Return the config of the image processor, None if the checkpoint has none.

    Raises CheckpointError for settings that are not supported.
    """
    raw = _image_fields(directory)
    if not raw:
        return None
    shared = _shared_fields(raw, patch_size=14, mean=_CLIP_MEAN, std=_CLIP_STD)
    return PixelConfig(**shared, **_bounds(raw, 56 * 56, 28 * 28 * 1280))


def video_config(directory: Path | str) -> VideoConfig | None:
    """Return the config of the video processor, None if the checkpoint has none.

    Raises CheckpointError for settings that are not supported.
    """
    raw = _video_fields(directory)
    if not raw:
        return None
    fps, num_frames = _sampling(raw, 2)
    return VideoConfig(
        **_shared_fields(raw, patch_size=16, mean=_HALF, std=_HALF),
        **_bounds(raw, 128 * 32 * 32, 32 * 32 * 768),
        sample_fps=fps,
        num_frames=num_frames,
        min_frames=int(raw.get("min_frames", 4)),
        max_frames=int(raw.get("max_frames", 768)),
        do_sample_frames=bool(raw.get("do_sample_frames", True)),
        cap_pixels_per_frame=bool(raw.get("cap_pixels_per_frame")),
        max_video_tokens=int(raw.get("max_video_tokens", 768)),
    )


def frame_video_config(
    directory: Path | str, pixels: tuple[int, int] | None = None
) -> FrameVideoConfig | None:
    """Return the config of a video processor like Qwen2-VL's; see `video_config`. `pixels`: of a
    frame, whatever the files say."""
    raw = _video_fields(directory)
    if not raw:
        return None
    fps, num_frames = _sampling(raw)
    sampled = bool(raw.get("do_sample_frames"))
    return FrameVideoConfig(
        **_shared_fields(raw, patch_size=14, mean=_CLIP_MEAN, std=_CLIP_STD),
        **_bounds({} if pixels else raw, *(pixels or (128 * 28 * 28, 28 * 28 * 768))),
        sample_fps=fps if sampled else None,
        num_frames=num_frames,
        min_frames=int(raw.get("min_frames", 4)),
        max_frames=int(raw.get("max_frames", 768)),
        do_sample_frames=sampled,
        cap_pixels_per_frame=bool(raw.get("cap_pixels_per_frame")),
        max_video_tokens=int(raw.get("max_video_tokens", 128000)),
    )


def _sampling(
    raw: Mapping[str, Any], default: float | None = None
) -> tuple[float | None, int | None]:
    """Return frames per second and the number of frames; one is None at least. Raises
    CheckpointError."""
    fps, num_frames = raw.get("fps", default), raw.get("num_frames")
    if fps is not None and num_frames is not None:
        raise CheckpointError("the video processor config sets both fps and num_frames")
    return None if fps is None else float(fps), num_frames


def _shared_fields(
    raw: Mapping[str, Any], *, patch_size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> dict[str, Any]:
    """Return the fields of `PictureConfig`, with defaults for fields missing in the file."""
    resample = raw.get("resample", _BICUBIC)
    if type(resample) is not int or resample not in _MODES:
        raise CheckpointError(f"resample {resample!r} of the processor config is not supported")
    return {
        "patch_size": _size_field(raw, "patch_size", patch_size),
        "temporal_patch_size": _size_field(raw, "temporal_patch_size", 2),
        "merge_size": _size_field(raw, "merge_size", 2),
        "do_resize": bool(raw.get("do_resize", True)),
        "resample": resample,
        "do_rescale": bool(raw.get("do_rescale", True)),
        "rescale_factor": float(raw.get("rescale_factor", 1 / 255)),
        "do_normalize": bool(raw.get("do_normalize", True)),
        "mean": tuple(map(float, raw.get("image_mean") or mean)),
        "std": tuple(map(float, raw.get("image_std") or std)),
    }


def square_side(name: str, value: Any) -> int:
    """Return the side of a square that a config gives once or for height and width. Raises
    CheckpointError."""
    sides = set(value) if isinstance(value, list | tuple) else {value}
    side = sides.pop() if len(sides) == 1 else None
    if type(side) is not int or side < 1:
        raise CheckpointError(f"{name} must be the side of a square, not {value!r}")
    return side


def _size_field(raw: Mapping[str, Any], name: str, default: int) -> int:
    """Read a positive integer. Raises CheckpointError."""
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"{name} of the processor config must be a positive integer, not {value!r}"
        )
    return value


def _bounds(raw: Mapping[str, Any], low: int, high: int) -> dict[str, Any]:
    """Read the bounds on the area: from `size`, under either pair of names, or from beside it."""
    size = raw.get("size") or {}
    size = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")} | size
    bounds = {}
    for name, default in (("min_pixels", low), ("max_pixels", high)):
        value = raw.get(name) if raw.get(name) is not None else size.get(name)
        bounds[name] = int(value) if value is not None else default
    return bounds


def check_fit(vision: Mapping[str, Any], *configs: PictureConfig | None) -> None:
    """Check that the processors cut the same patches as the vision tower. Raises CheckpointError.

    Args:
        vision: `vision_config` of config.json.
    """
    for config in configs:
        for name, theirs in (
            ("patch_size", "patch_size"),
            ("temporal_patch_size", "temporal_patch_size"),
            ("merge_size", "spatial_merge_size"),
        ):
            value = vision.get(theirs)
            if config is not None and value is not None and value != getattr(config, name):
                raise CheckpointError(
                    f"{name} of the processor config is {getattr(config, name)}, but {theirs} in "
                    f"config.json is {value!r}"
                )


def fingerprint(*configs: PictureConfig | None) -> bytes:
    """Return 32 bytes that change with the configs and with the arithmetic that applies them."""
    fields = [tagged("domain", b"vlm-serve processors"), tagged("version", _VERSION)]
    for config in configs:
        values = dataclasses.asdict(config) if config is not None else None
        fields.append(tagged(type(config).__name__, json.dumps(values, sort_keys=True)))
    return blake3(b"".join(fields)).digest()


def resize(pixels: torch.Tensor, size: tuple[int, int], config: PictureConfig) -> torch.Tensor:
    """Resize uint8 `[3, h, w]` to contiguous `[3, height, width]`.

    Args:
        pixels: uint8 `[3, h, w]`; channels-last strides are faster and give the same bits.
        size: (height, width).
    """
    assert pixels.dtype == torch.uint8
    if tuple(pixels.shape[-2:]) == size:
        return pixels.contiguous()
    mode = _MODES[config.resample]
    batch = pixels.unsqueeze(0)
    if mode == "bilinear" and "AVX" not in torch.backends.cpu.get_cpu_capability():
        # Without AVX, torch's uint8 path rounds between its two passes; torchvision avoids it too.
        smooth = torch.nn.functional.interpolate(batch.float(), size, mode=mode, antialias=True)
        return smooth.round_().clamp_(0, 255).to(torch.uint8).squeeze(0).contiguous()
    resized = torch.nn.functional.interpolate(batch, size, mode=mode, antialias=True)
    return resized.squeeze(0).contiguous()


def normalise(pixels: torch.Tensor, config: PictureConfig) -> torch.Tensor:
    """Rescale and normalise `[..., 3, height, width]` to float32 of the same shape in one step."""
    if not config.do_normalize:
        return pixels * config.rescale_factor if config.do_rescale else pixels.float()
    scale = 1.0 / config.rescale_factor if config.do_rescale else 1.0
    mean = torch.tensor(config.mean) * scale
    std = torch.tensor(config.std) * scale
    return pixels.float().sub_(mean[:, None, None]).div_(std[:, None, None])


@cache
def value_table(config: PictureConfig) -> torch.Tensor | None:
    """Return what `normalise` makes of each value of each channel, float32 `[3, 256]`; None unless
    it rescales and normalises."""
    if not (config.do_rescale and config.do_normalize):
        return None
    values = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    return normalise(values.expand(len(config.mean), -1, -1), config)[..., 0]


def patchify(frames: torch.Tensor, config: PictureConfig) -> torch.Tensor:
    """Cut one temporal patch into patches, in merge order.

    Args:
        frames: `[temporal_patch_size, channels, height, width]`.

    Returns:
        `[h * w, channels * temporal_patch_size * patch_size**2]`.
    """
    frame_count, channels, height, width = frames.shape
    assert frame_count == config.temporal_patch_size
    rows, columns = config.grid(height, width)
    merge, patch = config.merge_size, config.patch_size
    split = frames.reshape(
        frame_count, channels, rows // merge, merge, patch, columns // merge, merge, patch
    )
    ordered = split.permute(2, 5, 3, 6, 1, 0, 4, 7)
    return ordered.reshape(rows * columns, channels * frame_count * patch * patch)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceConfig(PictureConfig):
    """Settings for pictures seen whole and small, then in slices. Patches come row by row.

    Attributes:
        max_slices: maximum number of slices of a picture; 1: none.
        side: pictures and slices are resized to about the area of a square of this side, in pixels.
        downsample: patches per side that become one token, unless the request overrides it.
        numbered: put a number before each picture.
        enlarges: enlarge a small picture to that area.
    """

    max_slices: int
    side: int
    downsample: int
    numbered: bool
    enlarges: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceVideoConfig(SliceConfig):
    """Settings for videos, whose frames are treated like pictures.

    Attributes:
        max_frames: maximum number of frames of a video.
        do_sample_frames: False takes every frame.
    """

    max_frames: int
    do_sample_frames: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig(SliceConfig):
    """Settings for pictures cut into tiles, with the whole picture small behind them. Tiles are the
    slices: squares of `side` pixels, `max_slices` at most. The whole picture is squeezed into one
    (transformers' `GotOcr2ImageProcessor`).

    Attributes:
        min_slices: least number of tiles.
        thumbnail: show the whole picture behind its tiles.
    """

    min_slices: int
    thumbnail: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareVideoConfig(TileConfig):
    """Settings for videos, each of whose frames is squeezed into one tile (transformers'
    `InternVLVideoProcessor`).

    Attributes:
        sample_fps, num_frames: as of `VideoConfig`; both None: every frame is taken.
        max_frames: maximum number of frames of a video.
    """

    sample_fps: float | None
    num_frames: int | None
    max_frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTileConfig(TileConfig):
    """Settings by which the whole picture keeps its shape, and only a large one is cut
    (transformers' `Lfm2VlImageProcessor`).

    Attributes:
        min_tokens, max_tokens: of a picture that is seen whole.
        tolerance: a picture of so many times the most tokens is cut.
    """

    min_tokens: int
    max_tokens: int
    tolerance: float

    def bounds(self, merge_size: int) -> dict[str, int]:
        """Return the arguments of `image_size` for a picture that is seen whole."""
        factor = self.patch_size * merge_size
        low, high = self.min_tokens * factor**2, self.max_tokens * factor**2
        return {"factor": factor, "min_pixels": low, "max_pixels": high}


def square_tile_config(directory: Path | str, patch_size: int) -> TileConfig | None:
    """Return the config of the image processor, None if the checkpoint has none. Defaults are those
    of transformers' `InternVLProcessor`, which cuts whatever the file says of `crop_to_patches`.

    Args:
        patch_size: of config.json; the processor config has none.

    Raises CheckpointError for settings that are not supported or do not fit the patches.
    """
    raw = _image_fields(directory)
    if not raw:
        return None
    most, least = _size_field(raw, "max_patches", 12), _size_field(raw, "min_patches", 1)
    fields = _square_fields(raw, directory, patch_size)
    return TileConfig(**fields, max_slices=most, min_slices=least)


def square_video_config(directory: Path | str, patch_size: int) -> SquareVideoConfig | None:
    """Return the config of the video processor; see `square_tile_config`. As in transformers,
    frames are sampled only if the file says so."""
    raw = _video_fields(directory)
    if not raw:
        return None
    for name in ("do_resize", "initial_shift"):
        if raw.get(name, True) is not True:
            raise _unsupported(name, raw[name], True)
    fps, num_frames = _sampling(raw) if raw.get("do_sample_frames") else (None, None)
    return SquareVideoConfig(
        **_square_fields(raw, directory, patch_size),
        max_slices=1,
        min_slices=1,
        sample_fps=fps,
        num_frames=num_frames,
        max_frames=_size_field(raw, "max_frames", 768),
    )


def _square_fields(
    raw: Mapping[str, Any], directory: Path | str, patch_size: int
) -> dict[str, Any]:
    """Return the fields of `TileConfig` but the numbers of tiles."""
    size = raw.get("size") or {}
    side = square_side("size", [size.get("height", 384), size.get("width", 384)])
    if side % (2 * patch_size):
        raise CheckpointError(f"size {side} is no multiple of a token's {2 * patch_size} pixels")
    counted = read_json(Path(directory) / "processor_config.json").get("image_seq_length", 256)
    if counted != (made := (side // (2 * patch_size)) ** 2):
        raise _unsupported("image_seq_length", counted, made)
    shared = _shared_fields(
        {**raw, "patch_size": patch_size, "do_resize": True},
        patch_size=patch_size,
        mean=_CLIP_MEAN,
        std=_CLIP_STD,
    )
    return shared | {
        "temporal_patch_size": 1,
        "merge_size": 1,
        "side": side,
        "downsample": 2,
        "numbered": False,
        "thumbnail": True,
    }


def tile_image_config(directory: Path | str) -> FittedTileConfig | None:
    """Return the config of the image processor, None if the checkpoint has none. Defaults are those
    of transformers' `Lfm2VlImageProcessor`.

    Raises CheckpointError for settings that are not supported.
    """
    raw = _image_fields(directory)
    if not raw:
        return None
    marked = read_json(Path(directory) / "processor_config.json").get("use_image_special_tokens")
    if marked is False:
        raise _unsupported("use_image_special_tokens", False, True)
    named = {"patch_size": _size_field(raw, "encoder_patch_size", 16), "do_resize": True}
    shared = _shared_fields(
        {"resample": _BILINEAR, **raw, **named}, patch_size=16, mean=_HALF, std=_HALF
    )
    tolerance = raw.get("max_pixels_tolerance", 2.0)
    if type(tolerance) not in (int, float) or not tolerance > 0:
        raise CheckpointError(
            "max_pixels_tolerance of the processor config must be a positive number, not "
            f"{tolerance!r}"
        )
    least = _size_field(raw, "min_tiles", 2)
    if least < 2:
        raise _unsupported("min_tiles", least, 2)
    most = _size_field(raw, "max_tiles", 10) if raw.get("do_image_splitting", True) else 1
    return FittedTileConfig(
        **shared | {"temporal_patch_size": 1, "merge_size": 1},
        max_slices=most,
        side=_size_field(raw, "tile_size", 512),
        downsample=_size_field(raw, "downsample_factor", 2),
        numbered=False,
        min_slices=least,
        min_tokens=_size_field(raw, "min_image_tokens", 64),
        max_tokens=_size_field(raw, "max_image_tokens", 256),
        tolerance=float(tolerance),
        thumbnail=bool(raw.get("use_thumbnail", True)),
    )


def slice_image_config(directory: Path | str, mode: str = "16x") -> SliceConfig | None:
    """Return the config of the image processor, None if the checkpoint has none.

    A file may leave its `downsample_mode` to `mode`. Raises CheckpointError for settings that are
    not supported.
    """
    raw = _image_fields(directory)
    if not raw:
        return None
    # MiniCPM-OCR's processor may size pictures by their letters, which takes OpenCV.
    upsize = raw.get("small_image_upsize", "always")
    if upsize not in ("always", "never"):
        raise _unsupported("small_image_upsize", upsize, "always", "never")
    return SliceConfig(**_slice_fields(raw, directory, mode), enlarges=upsize == "always")


def slice_video_config(directory: Path | str, mode: str = "16x") -> SliceVideoConfig | None:
    """Return the config of the video processor; see `slice_image_config`."""
    raw = _video_fields(directory)
    if not raw:
        return None
    if raw.get("stack_frames", 1) != 1:
        raise _unsupported("stack_frames", raw["stack_frames"], 1)
    return SliceVideoConfig(
        **_slice_fields(raw, directory, mode),
        max_frames=_size_field(raw, "max_num_frames", 128),
        do_sample_frames=bool(raw.get("do_sample_frames", True)),
    )


def _slice_fields(raw: Mapping[str, Any], directory: Path | str, mode: str) -> dict[str, Any]:
    shared = _shared_fields(raw, patch_size=14, mean=_HALF, std=_HALF)
    if not shared["do_resize"]:
        raise _unsupported("do_resize", False, True)
    mode = raw.get("downsample_mode", mode)
    if mode not in MERGES:
        raise _unsupported("downsample_mode", mode, *MERGES)
    sliced = bool(raw.get("slice_mode", True))
    return shared | {
        # Each frame is its own temporal patch, and the tower reorders patches itself.
        "temporal_patch_size": 1,
        "merge_size": 1,
        "max_slices": _size_field(raw, "max_slice_nums", 9) if sliced else 1,
        "side": _size_field(raw, "scale_resolution", 448),
        "downsample": MERGES[mode],
        "numbered": _numbered(Path(directory)),
    }


def _numbered(directory: Path) -> bool:
    """Read `use_image_id` of the processor, or else of its image processor; true by default."""
    outer = read_json(directory / "processor_config.json").get("use_image_id")
    inner = _image_fields(directory).get("use_image_id", True)
    return bool(inner if outer is None else outer)


def check_modes(mode: Any, *processors: SliceConfig | None) -> None:
    """Check that the processors count as many tokens as the model makes, by its `downsample_mode`.
    Raises CheckpointError."""
    for processor in processors:
        if processor is not None and processor.downsample != MERGES.get(mode):
            theirs = next(name for name, merge in MERGES.items() if merge == processor.downsample)
            raise CheckpointError(
                f"downsample_mode of the processor config is {theirs!r}, but in config.json it is "
                f"{mode!r}"
            )


def _unsupported(name: str, value: Any, *known: Any) -> CheckpointError:
    return CheckpointError(
        f"{name} {value!r} of the processor config is not supported, only "
        + " and ".join(map(repr, known))
    )
