"""Options for all media of a request, in vLLM's two fields.

`media_io_kwargs` controls how files are read, by modality; `mm_processor_kwargs` controls the
checkpoint's processor. Both map to the per-part options, and a part's own options take precedence.
An option that cannot be honoured is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import MediaPart, Modality

_MODALITIES: tuple[Modality, ...] = ("image", "video")
_IO, _PROCESSOR = "media_io_kwargs", "mm_processor_kwargs"
# Nested processor arguments that apply to one modality.
_NESTED: dict[str, Modality] = {"images_kwargs": "image", "videos_kwargs": "video"}
_EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
# The only values accepted: others would give pixels unlike those the model was trained on.
_FIXED_IMAGE_IO = {"image_mode": "RGB", "rgba_background_color": [255, 255, 255]}

ONE_OF_EACH = tuple(MediaPart(modality, None, {}, modality) for modality in _MODALITIES)
"""Dummy parts: they check a request's options even if it has no such media."""


class MediaDefaults:
    """A request's options for all its media.

    Args:
        media_io_kwargs: `{"video": {"num_frames": n, "fps": f}, "image": {...}}`; n = -1 takes
            every frame, or every one sampled at f.
        mm_processor_kwargs: `fps`, `num_frames`, `max_frames`, `do_sample_frames` of videos;
            `min_pixels`, `max_pixels`, `size`, `max_slice_nums`, `downsample_mode` of images and
            videos alike; any of them also below `images_kwargs` or `videos_kwargs`, for one of the
            two. The model determines which of them it accepts.

    Raises InvalidRequestError for any other option, by name.
    """

    def __init__(self, media_io_kwargs: Any, mm_processor_kwargs: Any) -> None:
        self._options: dict[Modality, dict[str, Any]] = {"image": {}, "video": {}}
        self._named: dict[Modality, dict[str, str]] = {"image": {}, "video": {}}
        self._read_io(_object(media_io_kwargs, _IO))
        self._read_processor(_object(mm_processor_kwargs, _PROCESSOR), _PROCESSOR, _MODALITIES)

    def apply(self, parts: Iterable[MediaPart]) -> list[MediaPart]:
        """Return the parts with these options filled in; a part's own options take precedence."""
        return [
            replace(
                part.joined(),
                options={**self._options[part.modality], **part.options},
                named={**self._named[part.modality], **dict.fromkeys(part.options, part.param)},
            )
            for part in parts
        ]

    def _read_io(self, given: Mapping[str, Any]) -> None:
        for modality, kwargs in given.items():
            where = f"{_IO}.{modality}"
            if modality not in _MODALITIES:
                raise _refused(where)
            for name, value in _object(kwargs, where).items():
                place = f"{where}.{name}"
                if value is None:
                    continue
                if modality == "video" and name in ("num_frames", "fps"):
                    option = "sample_fps" if name == "fps" else name
                    if name == "fps" and value == -1:  # as in vLLM: no rate is requested
                        continue
                    self._set("video", option, value, place)
                elif modality == "video" or _FIXED_IMAGE_IO.get(name, ...) != _plain(value):
                    raise _refused(place)

    def _read_processor(
        self, given: Mapping[str, Any], where: str, modalities: tuple[Modality, ...]
    ) -> None:
        for name, value in given.items():
            place = f"{where}.{name}"
            if value is None:
                continue
            if name in _NESTED and where == _PROCESSOR:
                self._read_processor(_object(value, place), place, (_NESTED[name],))
            elif name in ("min_pixels", "max_pixels", "max_slice_nums", "downsample_mode"):
                for modality in modalities:
                    self._set(modality, name, value, place)
            elif name == "size":
                self._read_size(_object(value, place), place, modalities)
            elif "video" in modalities:
                self._read_sampling(name, value, place)
            else:
                raise _refused(place)

    def _read_size(
        self, size: Mapping[str, Any], where: str, modalities: tuple[Modality, ...]
    ) -> None:
        for name, value in size.items():
            place = f"{where}.{name}"
            if name not in _EDGES:
                raise _refused(place)
            for modality in modalities:
                self._set(modality, _EDGES[name], value, place)

    def _read_sampling(self, name: str, value: Any, place: str) -> None:
        if name == "do_sample_frames":
            # False takes the frames sampled by media_io_kwargs; without it, none are defined.
            sampled = any(named.startswith(_IO) for named in self._named["video"].values())
            if value is not True and (value is not False or not sampled):
                raise InvalidRequestError(
                    f"{place} cannot be false without {_IO}.video.num_frames or fps", param=place
                )
        elif name in ("fps", "num_frames", "max_frames"):
            self._set("video", "sample_fps" if name == "fps" else name, value, place)
        else:
            raise _refused(place)

    def _set(self, modality: Modality, name: str, value: Any, place: str) -> None:
        if name in self._options[modality]:
            before = self._named[modality][name]
            raise InvalidRequestError(f"{place} sets the same option as {before}", param=place)
        self._options[modality][name] = value
        self._named[modality][name] = place


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidRequestError(f"{where} must be an object", param=where)
    return value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _refused(where: str) -> InvalidRequestError:
    shown = where if len(where) <= 80 else where[:77] + "..."
    return InvalidRequestError(f"{shown} cannot be set per request", param=shown)
