"""Loads the media of a prompt: fetched, looked up in the raw index, decoded where need be."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch

from vlm_serve.errors import InvalidRequestError, MediaError, MediaFetchError
from vlm_serve.host_threads import releasing
from vlm_serve.preprocess.decoders import Decoders
from vlm_serve.preprocess.fetch import FetchBudget, Hold, Holding, fetch, read_file
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.media_frames import ArrayVideo
from vlm_serve.preprocess.media_image import Pixels, image_to_rgb
from vlm_serve.preprocess.media_options import options_key
from vlm_serve.preprocess.media_process import MediaRecord, Processed
from vlm_serve.preprocess.media_processors import Processor
from vlm_serve.preprocess.messages import MediaPart
from vlm_serve.preprocess.processors import PictureConfig, fingerprint, normalise, patchify
from vlm_serve.preprocess.raw_index import RawIndex, raw_key
from vlm_serve.preprocess.stopping import Stop

_CONVERSIONS = 2
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


class LoadedMedia:
    """A `MediaItem`: its record, and its pixels once they are needed.

    Args:
        record: grid, hashes and times.
        config: of the processor that made it.
        processed: with the pixels; None while they are only known by their hashes.
        reload: makes them again; raises MediaError.
    """

    def __init__(
        self,
        record: MediaRecord,
        config: PictureConfig,
        processed: Processed | None,
        reload: Callable[[Stop], Processed],
    ) -> None:
        self.record = record
        self.modality = record.modality
        self.grid = record.grid
        self.decoded = processed is not None
        self._config = config
        self._processed = processed
        self._reload: Callable[[Stop], Processed] | None = reload if processed is None else None
        self._lock = threading.Lock()

    def patches(self, patch: int) -> torch.Tensor:
        """See `MediaItem.patches`."""
        assert 0 <= patch < len(self.record.hashes)
        count = self._config.temporal_patch_size
        frames = normalise(self._get_processed(Stop()).frames(patch, count), self._config)
        return patchify(frames.expand(count, -1, -1, -1), self._config)

    @property
    def num_bytes(self) -> int:
        """See `MediaItem.num_bytes`."""
        frames = self._config.temporal_patch_size if self.modality == "video" else 1
        patches = math.prod(self.grid)
        if self.record.slices is not None:
            patches += self.grid[0] * self.record.slices.count * math.prod(self.record.slices.grid)
        return patches * frames * 3 * self._config.patch_size**2

    @property
    def ready(self) -> bool:
        """See `MediaItem.ready`."""
        return self._processed is not None

    def load(self, stop: Stop) -> None:
        """See `MediaItem.load`."""
        self._get_processed(stop)

    def _get_processed(self, stop: Stop) -> Processed:
        with self._lock:
            if self._processed is None:
                assert self._reload is not None
                processed = self._reload(stop)
                if processed.record != self.record:
                    raise MediaError("a medium no longer has the content it was recorded with")
                self._processed, self._reload, self.decoded = processed, None, True
            return self._processed


class MediaLoader:
    """Turns the media parts of a request into items. Thread-safe.

    Args:
        images, videos: the checkpoint's processors; None where the checkpoint takes no such media.
        limits: bounds on what is fetched and decoded.
        raw_index: where records of earlier uploads are kept.
        decoders: decode what comes as a file.

    Attributes:
        also_holding: counts what is fetched too, beside the loader's own budget; None: nobody does.
    """

    def __init__(
        self,
        images: Processor | None,
        videos: Processor | None,
        limits: MediaLimits,
        raw_index: RawIndex,
        decoders: Decoders,
    ) -> None:
        self._images, self._videos, self._limits = images, videos, limits
        self._raw_index, self._decoders = raw_index, decoders
        self._budget = FetchBudget(limits.max_fetched_bytes)
        self.also_holding: Holding | None = None
        # Pictures and arrays of Python callers are converted here, not many at a time.
        self._converting = threading.BoundedSemaphore(_CONVERSIONS)
        self.fingerprint = fingerprint(
            *(each.config if each else None for each in (images, videos))
        )

    def _processor(self, part: MediaPart) -> Processor | None:
        return self._images if part.modality == "image" else self._videos

    def check_count(self, parts: list[MediaPart]) -> None:
        """Raises InvalidRequestError if a prompt has more media, or others, than it may."""
        for modality, config, limit in (
            ("image", self._images, self._limits.max_images),
            ("video", self._videos, self._limits.max_videos),
        ):
            found = [part for part in parts if part.modality == modality]
            if found and config is None:
                raise InvalidRequestError(
                    f"this model takes no {modality}s", param=found[0].param, code="no_media"
                )
            if limit is not None and len(found) > limit:
                raise InvalidRequestError(
                    f"a prompt may hold {limit} {modality}s, this one has {len(found)}",
                    param=found[limit].param,
                )

    def check_options(self, parts: Iterable[MediaPart]) -> None:
        """Raises InvalidRequestError for an option that is out of bounds. Parts of a kind that the
        model does not take are passed over."""
        for part in parts:
            processor = self._processor(part)
            if processor is not None:
                processor.options(part)

    def load(self, part: MediaPart, cache_salt: str, stop: Stop) -> LoadedMedia:
        """The item of one part. Only what the raw index does not know is decoded.

        Raises MediaFetchError, MediaError or InvalidRequestError; OverloadedError while too much is
        being fetched; StoppedError.
        """
        stop.check()
        with self._holding(stop) as hold:
            return self._load(part, cache_salt, stop, hold)

    @contextlib.contextmanager
    def _holding(self, stop: Stop) -> Iterator[Hold]:
        with self._budget.holding() as own, contextlib.ExitStack() as stack:
            counters = [own]
            if self.also_holding is not None:
                counters.append(stack.enter_context(self.also_holding(stop)))

            def hold(size: int) -> None:
                for count in counters:
                    count(size)

            yield hold

    def _load(self, part: MediaPart, cache_salt: str, stop: Stop, hold: Hold) -> LoadedMedia:
        processor = self._processor(part)
        assert processor is not None
        config, options = processor.config, processor.options(part)
        key_of = partial(
            raw_key,
            cache_salt=cache_salt,
            modality=part.modality,
            options=options_key(options),
            fingerprint=self.fingerprint,
        )
        # The text of a data: URL says as much as its bytes, and base64 is slower than hashing.
        url_key = key_of(part.source) if _is_data_url(part.source) else None
        known = self._raw_index.get(url_key) if url_key is not None else None
        if known is not None:
            return self._recall(
                known, config, url_key, partial(self._read_and_process, part, options, processor)
            )
        source = self._read_source(part, stop, hold)
        indexed = isinstance(source, bytes) or _is_contiguous(source)
        key = key_of(source) if indexed else None
        known = self._raw_index.get(key) if key is not None else None

        process = partial(self._process, part, source, options, processor)
        if known is not None:
            item = self._recall(known, config, key, process)
        else:
            done = process(stop)
            item = LoadedMedia(done.record, config, done, process)
        for each in (key, url_key):
            if each is not None:
                self._raw_index.put(each, item.record)
        return item

    def _recall(
        self,
        known: MediaRecord,
        config: PictureConfig,
        key: bytes | None,
        process: Callable[[Stop], Processed],
    ) -> LoadedMedia:
        """An item that is known by its record alone."""

        def process_again(stop: Stop) -> Processed:
            done = process(stop)
            if done.record != known and key is not None:
                self._raw_index.remove(key)
            return done

        return LoadedMedia(known, config, None, process_again)

    def _read_and_process(
        self, part: MediaPart, options: Any, processor: Processor, stop: Stop
    ) -> Processed:
        return self._process(part, self._read_source(part, stop), options, processor, stop)

    @releasing
    def _process(
        self, part: MediaPart, source: Any, options: Any, processor: Processor, stop: Stop
    ) -> Processed:
        if isinstance(source, bytes):
            with self._decode(part, source, options, stop) as decoded, stop.timed("resize"):
                return processor.process(decoded, options, part.param)
        with self._converting:
            return processor.process(self._convert(part, source, options), options, part.param)

    def _decode(
        self, part: MediaPart, source: bytes, options: Any, stop: Stop
    ) -> AbstractContextManager[Any]:
        limits, decoders = self._limits, self._decoders
        if part.modality == "image":
            return decoders.image(source, limits, part.param, stop)
        return decoders.video(source, options.fps, limits, part.param, stop)

    def _convert(self, part: MediaPart, source: Any, options: Any) -> Any:
        if part.modality == "image":
            return _image_pixels(source, self._limits, part.param)
        return ArrayVideo(source, options.fps, self._limits, part.param)

    def _read_source(self, part: MediaPart, stop: Stop, hold: Hold | None = None) -> Any:
        source, limits = part.source, self._limits
        is_image = part.modality == "image"
        max_bytes = limits.max_image_bytes if is_image else limits.max_video_bytes
        if isinstance(source, bytes | bytearray | memoryview):
            return bytes(source)
        if isinstance(source, str) and (part.url_only or _SCHEME.match(source)):
            return fetch(
                source, max_bytes=max_bytes, limits=limits, param=part.param, stop=stop, hold=hold
            )
        if isinstance(source, str | Path):
            try:
                return read_file(Path(source), max_bytes, param=part.param)
            except (OSError, ValueError) as error:
                if isinstance(error, InvalidRequestError):
                    raise
                raise MediaFetchError("the file cannot be read", param=part.param) from None
        if part.url_only:
            raise InvalidRequestError(f"{part.param} must be a URL", param=part.param)
        return source


def is_remote(part: MediaPart) -> bool:
    """True if loading the part waits for another machine."""
    return isinstance(part.source, str) and part.source[:5].lower().startswith("http")


def _is_data_url(source: Any) -> bool:
    return isinstance(source, str) and source[:5].lower() == "data:" and source.isascii()


def _is_contiguous(source: Any) -> bool:
    return (
        isinstance(source, np.ndarray)
        and source.dtype == np.uint8
        and bool(source.flags.c_contiguous)
    )


def _image_pixels(source: Any, limits: MediaLimits, param: str) -> Pixels:
    if isinstance(source, np.ndarray):
        try:
            source = PIL.Image.fromarray(source)
        except (TypeError, ValueError):
            raise MediaError("the array is no picture", param=param) from None
    if isinstance(source, PIL.Image.Image):
        return image_to_rgb(source, limits, param)
    raise MediaError("an image must be a PIL image, an array, bytes, a path or a URL", param=param)
