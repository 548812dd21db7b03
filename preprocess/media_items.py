"""Loads the media of a prompt: fetches them, looks them up in the raw index, decodes on demand."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import PIL.Image

from vlm_serve.errors import InvalidRequestError, MediaError, MediaFetchError
from vlm_serve.host_threads import releasing
from vlm_serve.preprocess.decoders import Decoders
from vlm_serve.preprocess.decoding_path import decoding_path
from vlm_serve.preprocess.fetch import FetchBudget, Hold, Holding, fetch, read_file
from vlm_serve.preprocess.frame_files import (
    FrameFiles,
    ListedVideo,
    check_frame_count,
    frame_sources,
    listed_options,
    places,
)
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.loaded_media import LoadedMedia
from vlm_serve.preprocess.media_frames import ArrayVideo
from vlm_serve.preprocess.media_image import Pixels, image_to_rgb
from vlm_serve.preprocess.media_options import options_key
from vlm_serve.preprocess.media_process import MediaRecord, Processed
from vlm_serve.preprocess.media_processors import Processor
from vlm_serve.preprocess.pdf_pages import PdfPage
from vlm_serve.preprocess.processors import fingerprint
from vlm_serve.preprocess.raw_index import RawIndex, raw_key
from vlm_serve.preprocess.reading.conversation import MediaPart
from vlm_serve.preprocess.stopping import Stop
from vlm_serve.preprocess.upload_records import UploadRecords, upload_key

_CONVERSIONS = 2
_NOTHING: Mapping[Literal["image", "video"], str] = MappingProxyType({})
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


class MediaLoader:
    """Turns the media parts of a request into items. Thread-safe.

    Args:
        images, videos: the checkpoint's processors; None for media it does not support.
        limits: limits on fetching and decoding.
        raw_index: keeps records of earlier uploads.
        decoders: decode media that come as files.
        missing: files that the checkpoint lacks, by the kind of media that it takes with them.

    Attributes:
        shared_budget: a second budget for fetched bytes, besides the loader's own; None: there is
            none.
        fingerprint: names the processors.
        counts: number of media "decoded"; of media found by record, in the "index" or in the
            "tiers"; and of "unconfirmed" ones, whose record proved wrong when they were decoded.
    """

    def __init__(
        self,
        images: Processor | None,
        videos: Processor | None,
        limits: MediaLimits,
        raw_index: RawIndex,
        decoders: Decoders,
        missing: Mapping[Literal["image", "video"], str] = _NOTHING,
    ) -> None:
        self._missing = missing
        self._images, self._videos, self._limits = images, videos, limits
        self._raw_index, self._decoders = raw_index, decoders
        self._records: UploadRecords | None = None
        self._path = b""
        self.counts = Counter[str]()
        self._counting = threading.Lock()
        self._budget = FetchBudget(limits.max_fetched_bytes)
        self.shared_budget: Holding | None = None
        # Pictures and arrays of Python callers are converted in this process, a few at a time.
        self._converting = threading.BoundedSemaphore(_CONVERSIONS)
        self.fingerprint = fingerprint(
            *(each.config if each else None for each in (images, videos))
        )

    def keep_records(self, records: UploadRecords) -> None:
        """Keep records of files in `records` too, from now on."""
        self._path = decoding_path(self._limits)
        self._records = records

    def _processor(self, part: MediaPart) -> Processor | None:
        return self._images if part.modality == "image" else self._videos

    def check_count(self, parts: list[MediaPart]) -> None:
        """Check the number and kinds of a prompt's media. Raises InvalidRequestError."""
        kinds: tuple[tuple[Literal["image", "video"], Processor | None, int | None], ...] = (
            ("image", self._images, self._limits.max_images),
            ("video", self._videos, self._limits.max_videos),
        )
        for modality, config, limit in kinds:
            found = [part for part in parts if part.modality == modality]
            if found and config is None:
                file = self._missing.get(modality)
                why = f": the checkpoint has no {file}" if file else ""
                raise InvalidRequestError(
                    f"this model takes no {modality}s{why}", param=found[0].param, code="no_media"
                )
            if limit is not None and len(found) > limit:
                raise InvalidRequestError(
                    f"a prompt may have at most {limit} {modality}s, this one has {len(found)}",
                    param=found[limit].param,
                )

    def check_options(self, parts: Iterable[MediaPart]) -> None:
        """Check the options of media parts; skip media that the model does not support.

        Raises InvalidRequestError for an option out of bounds.
        """
        for part in parts:
            processor = self._processor(part)
            if processor is not None:
                processor.options(part)

    def load(self, part: MediaPart, cache_salt: str, stop: Stop) -> LoadedMedia:
        """Load the item of one part; decode it only if its record is unknown.

        Raises MediaFetchError, MediaError or InvalidRequestError; OverloadedError if the fetch
        budget is exhausted; StoppedError.
        """
        stop.check()
        with self._holding(stop) as hold:
            return self._load(part, cache_salt, stop, hold)

    @contextlib.contextmanager
    def _holding(self, stop: Stop) -> Iterator[Hold]:
        with self._budget.holding() as own, contextlib.ExitStack() as stack:
            counters = [own]
            if self.shared_budget is not None:
                counters.append(stack.enter_context(self.shared_budget(stop)))

            def hold(size: int) -> None:
                for count in counters:
                    count(size)

            yield hold

    def _load(self, part: MediaPart, cache_salt: str, stop: Stop, hold: Hold) -> LoadedMedia:
        processor = self._processor(part)
        assert processor is not None
        options = processor.options(part)
        if part.modality == "video" and frame_sources(part.source) is not None:
            options = listed_options(part, options)
        key_of = partial(
            raw_key,
            cache_salt=cache_salt,
            modality=part.modality,
            options=options_key(options),
            fingerprint=self.fingerprint,
        )
        # A data: URL's text identifies its bytes, and hashing it is faster than decoding base64.
        url_key = key_of(part.source) if _is_data_url(part.source) else None
        known = self._raw_index.get(url_key) if url_key is not None else None
        if known is not None and url_key is not None:
            self._count("index")
            read = partial(self._read_source, part)
            return self._recall(known, _Upload(part, options, processor, key_of, (url_key,), read))
        source = self._read_source(part, stop, hold)
        key = key_of(_hashed(source)) if _has_key(source) else None
        keys = tuple(each for each in (key, url_key) if each is not None)
        upload = _Upload(part, options, processor, key_of, keys, lambda _: source)
        began = time.monotonic()
        known = self._look_up(key, source)
        waited = time.monotonic() - began
        if known is not None:
            item = self._recall(known, upload, waited)
        else:
            done = self._process(upload, source, stop)
            item = LoadedMedia(done.record, processor.config, done, waited=waited)
            if key is not None and isinstance(source, bytes) and self._records is not None:
                self._records.put(upload_key(key, self._path), done.record)
        for each in keys:
            self._raw_index.put(each, item.record)
        return item

    def _look_up(self, key: bytes | None, source: Any) -> MediaRecord | None:
        """Look up the record of an upload in the raw index and, for bytes, in the tiers.

        Arrays are not looked up in the tiers: a caller may have changed one since its key was made.
        """
        known = self._raw_index.get(key) if key is not None else None
        if known is not None:
            self._count("index")
        elif key is not None and isinstance(source, bytes) and self._records is not None:
            known = self._records.get(upload_key(key, self._path))
            if known is not None:
                self._count("tiers")
        return known

    def _recall(self, known: MediaRecord, upload: _Upload, waited: float = 0.0) -> LoadedMedia:
        """Return an item known by its record alone; it is decoded when its pixels are needed."""

        def process(stop: Stop) -> Processed:
            source = upload.read(stop)
            done = self._process(upload, source, stop)
            if done.record != known:
                self._correct(upload, source, done.record)
            return done

        return LoadedMedia(known, upload.processor.config, None, process, waited)

    def _correct(self, upload: _Upload, source: Any, record: MediaRecord) -> None:
        """Replace the wrong record of an upload, or drop it if the source is an array.

        An array may have changed since its keys were made.
        """
        self._count("unconfirmed")
        for key in upload.keys:
            self._raw_index.remove(key)
            if isinstance(source, bytes):
                self._raw_index.put(key, record)
        if isinstance(source, bytes) and self._records is not None:
            self._records.replace(upload_key(upload.key_of(source), self._path), record)

    def _count(self, what: str) -> None:
        with self._counting:
            self.counts[what] += 1

    def _process(self, upload: _Upload, source: Any, stop: Stop) -> Processed:
        done = self._run(upload.part, source, upload.options, upload.processor, stop)
        self._count("decoded")
        return done

    @releasing
    def _run(
        self, part: MediaPart, source: Any, options: Any, processor: Processor, stop: Stop
    ) -> Processed:
        if isinstance(source, bytes):
            with self._decode(part, source, options, stop) as decoded, stop.timed("resize"):
                return processor.process(decoded, options, part.param)
        if isinstance(source, FrameFiles):
            video = self._frames(part, source, options, stop)
            return processor.process(video, options, part.param)
        with self._converting:
            return processor.process(self._convert(part, source, options), options, part.param)

    def _decode(
        self, part: MediaPart, source: bytes, options: Any, stop: Stop
    ) -> AbstractContextManager[Any]:
        limits, decoders = self._limits, self._decoders
        if part.modality == "image":
            return decoders.image(source, limits, part.param, stop)
        return decoders.video(source, options.fps, limits, part.param, stop)

    def _frames(self, part: MediaPart, source: FrameFiles, options: Any, stop: Stop) -> ListedVideo:
        images = list(places(part, source.files))

        def decode(index: int) -> AbstractContextManager[Pixels]:
            file, param = source.files[index], images[index].param
            return self._decoders.image(file, self._limits, param, stop)

        return ListedVideo(decode, len(source.files), options.fps, self._limits, part.param)

    def _convert(self, part: MediaPart, source: Any, options: Any) -> Any:
        if part.modality == "image":
            return _image_pixels(source, self._limits, part.param)
        return ArrayVideo(source, options.fps, self._limits, part.param)

    def _read_source(self, part: MediaPart, stop: Stop, hold: Hold | None = None) -> Any:
        source, limits = part.source, self._limits
        is_image = part.modality == "image"
        max_bytes = limits.max_image_bytes if is_image else limits.max_video_bytes
        frames = frame_sources(source) if not is_image else None
        if frames is not None:
            check_frame_count(frames, part.param)
            read = (self._read_source(each, stop, hold) for each in places(part, frames))
            return FrameFiles(tuple(read))
        if isinstance(source, PdfPage):
            return source.packed
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


@dataclass(frozen=True, slots=True)
class _Upload:
    """A medium as given by the client.

    Attributes:
        options: the effective ones.
        key_of: returns the key of the content, given bytes or an array.
        keys: its keys in the raw index; none for pictures of Python callers.
        read: gets the bytes or the array.
    """

    part: MediaPart
    options: Any
    processor: Processor
    key_of: Callable[..., bytes]
    keys: tuple[bytes, ...]
    read: Callable[[Stop], Any]


def is_remote(part: MediaPart) -> bool:
    """Return True if loading the part waits for another machine."""
    sources = part.source if isinstance(part.source, list) else [part.source]
    return any(isinstance(each, str) and each[:5].lower().startswith("http") for each in sources)


def _has_key(source: Any) -> bool:
    return isinstance(source, bytes | FrameFiles) or _is_contiguous(source)


def _hashed(source: Any) -> Any:
    return source.packed if isinstance(source, FrameFiles) else source


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
            raise MediaError("the array is not a valid image", param=param) from None
    if isinstance(source, PIL.Image.Image):
        return image_to_rgb(source, limits, param)
    raise MediaError("an image must be a PIL image, an array, bytes, a path or a URL", param=param)
