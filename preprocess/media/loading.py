"""Loads the media of a prompt: fetches them, looks them up in the raw index, decodes on demand."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch

from vlm_serve.errors import InvalidRequestError, MediaError, MediaFetchError, MediaNotHeldError
from vlm_serve.preprocess.identity.keys import embedding_key, medium_hash
from vlm_serve.preprocess.identity.prompt import UnconfirmedError
from vlm_serve.preprocess.media.decoders import Decoders, twice
from vlm_serve.preprocess.media.fetch import FetchBudget, Hold, Holding, fetch, naming, read_file
from vlm_serve.preprocess.media.frames import (
    ArrayVideo,
    FrameFiles,
    ListedVideo,
    check_frame_count,
    frame_sources,
    listed_options,
    places,
)
from vlm_serve.preprocess.media.images import PdfPage, Pixels, image_to_rgb
from vlm_serve.preprocess.media.known_frames import KnownVideo
from vlm_serve.preprocess.media.limits import LostFramesError, MediaLimits
from vlm_serve.preprocess.media.media_processors import Processor
from vlm_serve.preprocess.media.part_options import options_key
from vlm_serve.preprocess.media.processing import MediaRecord, Processed
from vlm_serve.preprocess.media.processors import (
    PictureConfig,
    fingerprint,
    normalise,
    patchify,
    value_table,
)
from vlm_serve.preprocess.media.raw_index import (
    RawIndex,
    UploadRecords,
    decoding_path,
    raw_digest,
    raw_key,
    upload_key,
)
from vlm_serve.preprocess.reading.conversation import (
    MediaName,
    MediaPart,
    Modality,
    StoredUpload,
)
from vlm_serve.system.host_threads import releasing
from vlm_serve.system.stopping import Stop

_CONVERSIONS = 2
_ALL_FRAMES = b"frames"
"""In place of options in the key of a file whose frames are known; no options are equal to it."""


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


class MediaLoader:
    """Turns the media parts of a request into items. Thread-safe.

    Args:
        images, videos: the checkpoint's processors; None for media it does not support.
        limits: limits on fetching and decoding.
        raw_index: keeps records of earlier uploads, and of frames of video files.
        decoders: decode media that come as files.
        missing: files that the checkpoint lacks, by the kind of media that it takes with them.

    Attributes:
        shared_budget: a second budget for fetched bytes, besides the loader's own; None: there is
            none.
        embedded: tells from any thread, by its key, whether an embedding is at hand; None: unknown.
        fingerprint: names the processors.
        counts: number of media "decoded"; of media found by record, in the "index" or in the
            "tiers"; of videos known by their "frames"; and of "unconfirmed" ones, whose record
            proved wrong when they were decoded.
    """

    def __init__(
        self,
        images: Processor | None,
        videos: Processor | None,
        limits: MediaLimits,
        raw_index: RawIndex,
        decoders: Decoders,
        missing: Mapping[Modality, str],
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
        self.embedded: Callable[[bytes], bool] | None = None
        # Pictures and arrays of Python callers are converted in this process, a few at a time.
        self._converting = threading.BoundedSemaphore(_CONVERSIONS)
        self.fingerprint = fingerprint(
            *(processor.config if processor else None for processor in (images, videos))
        )

    def keep_records(self, records: UploadRecords) -> None:
        """Keep records of files in `records` too, from now on."""
        self._path = decoding_path(self._limits)
        self._records = records

    def _processor(self, part: MediaPart) -> Processor | None:
        return self._images if part.modality == "image" else self._videos

    def check_count(self, parts: list[MediaPart]) -> None:
        """Check the number and kinds of a prompt's media. Raises InvalidRequestError."""
        kinds: tuple[tuple[Modality, Processor | None, int | None], ...] = (
            ("image", self._images, self._limits.max_images),
            ("video", self._videos, self._limits.max_videos),
        )
        for modality, config, limit in kinds:
            media = [part for part in parts if part.modality == modality]
            if media and config is None:
                file = self._missing.get(modality)
                why = f": the checkpoint has no {file}" if file else ""
                raise InvalidRequestError(
                    f"this model takes no {modality}s{why}", param=media[0].param, code="no_media"
                )
            if limit is not None and len(media) > limit:
                raise InvalidRequestError(
                    f"a prompt may have at most {limit} {modality}s, this one has {len(media)}",
                    param=media[limit].param,
                )

    def check_options(self, parts: Iterable[MediaPart]) -> None:
        """Check the options of media parts; skip media that the model does not support.

        Raises InvalidRequestError for an option out of bounds.
        """
        for part in parts:
            processor = self._processor(part)
            if processor is not None:
                processor.options(part)

    def load(
        self,
        part: MediaPart,
        cache_salt: str,
        stop: Stop,
        vision_root: bytes | None = None,
    ) -> LoadedMedia:
        """Load the item of one part; decode it only if its record is unknown.

        Args:
            vision_root: of the prompt's embeddings; with it, known frames of a video whose
                embeddings are at hand are not decoded.

        Raises MediaFetchError, MediaError or InvalidRequestError; OverloadedError if the fetch
        budget is exhausted; StoppedError.
        """
        stop.check()
        with self.holding(stop) as hold:
            item = self._load(part, cache_salt, stop, hold, vision_root)
        if part.on_loaded is not None:
            part.on_loaded(item.name)
        return item

    def read(self, part: MediaPart, stop: Stop, hold: Hold | None) -> Any:
        """Return what a part names, bytes of a URL. Raises as `load` does."""
        return _read_source(part.joined(), self._limits, stop, hold)

    @contextlib.contextmanager
    def holding(self, stop: Stop) -> Iterator[Hold]:
        """Yield a function that reserves bytes in both budgets until the end of the block."""
        with self._budget.holding() as budget, contextlib.ExitStack() as stack:
            counters = [budget]
            if self.shared_budget is not None:
                counters.append(stack.enter_context(self.shared_budget(stop)))

            def hold(size: int) -> None:
                for count in counters:
                    count(size)

            yield hold

    def _load(
        self,
        part: MediaPart,
        cache_salt: str,
        stop: Stop,
        hold: Hold,
        vision_root: bytes | None,
    ) -> LoadedMedia:
        processor = self._processor(part)
        assert processor is not None
        options = processor.options(part)
        if part.modality == "video" and frame_sources(part.source) is not None:
            options = listed_options(part, options)
        key_of = partial(
            raw_key,
            cache_salt=cache_salt,
            modality=part.modality,
            fingerprint=self.fingerprint,
        )
        chosen = options_key(options)
        # A data: URL's text identifies its bytes, and hashing it is faster than decoding base64.
        url_key = None
        if _is_data_url(part.source):
            url_key = key_of(raw_digest(part.source), options=chosen)
        known = self._raw_index.get(url_key) if url_key is not None else None
        if known is not None and url_key is not None:
            self._count("index")
            read = partial(_read_source, part, self._limits)
            upload = _Upload(part, options, processor, key_of, (url_key,), read)
            return self._item(known, upload, 0.0)
        source = _read_source(part, self._limits, stop, hold)
        digest = _digest_of(source)
        key = key_of(digest, options=chosen) if digest is not None else None
        keys = tuple(index_key for index_key in (key, url_key) if index_key is not None)
        upload = _Upload(part, options, processor, key_of, keys, lambda _: source, digest)
        began = time.monotonic()
        known = self._look_up(key, source)
        waited = time.monotonic() - began
        if known is not None:
            item = self._item(known, upload, waited)
        else:
            held = self._held(vision_root)
            done = self._process(upload, source, stop, held, recall=True)
            item = self._item(done.record, upload, waited, done)
            if key is not None and isinstance(source, bytes) and self._records is not None:
                self._records.put(upload_key(key, self._path), done.record)
        for index_key in keys:
            self._raw_index.put(index_key, item.record)
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

    def _item(
        self, record: MediaRecord, upload: _Upload, waited: float, done: Processed | None = None
    ) -> LoadedMedia:
        """Return an item; what was not decoded is when its pixels are needed: all if it is known by
        its record alone, or some frames."""
        config = upload.processor.config
        if done is not None and done.kept is None:
            return LoadedMedia(record, config, done, waited=waited)
        part = done if done is not None and done.kept else None
        return LoadedMedia(record, config, part, partial(self._reload, record, upload), waited)

    def _reload(
        self, known: MediaRecord, upload: _Upload, stop: Stop, patches: Collection[int] | None
    ) -> Processed:
        source = upload.read(stop)
        wanted = None if patches is None else {known.span(patch)[0] for patch in patches}
        done = self._process(upload, source, stop, wanted=wanted, recall=wanted is not None)
        if done.record != known and done.kept is not None:
            done = self._process(upload, source, stop)
        if done.record != known:
            self._correct(upload, source, done.record)
        return done

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
            key = upload.key_of(raw_digest(source), options=options_key(upload.options))
            self._records.replace(upload_key(key, self._path), record)

    def _count(self, outcome: str) -> None:
        with self._counting:
            self.counts[outcome] += 1

    def _process(
        self,
        upload: _Upload,
        source: Any,
        stop: Stop,
        held: Callable[[bytes, int], bool] | None = None,
        *,
        recall: bool = False,
        wanted: Collection[int] | None = None,
    ) -> Processed:
        """Decode a medium; with `recall` only those frames of a video file that are needed, see
        `KnownVideo`."""
        known = None
        if upload.part.modality == "video" and isinstance(source, bytes):
            fps, digest = upload.options.fps, upload.digest or raw_digest(source)
            opened = partial(self._decoders.video, source, fps, self._limits, stop)
            key = upload_key(upload.key_of(digest, options=_ALL_FRAMES), self._path)
            index = self._raw_index.frames
            known = KnownVideo(opened, index, key, fps, held=held, recall=recall, wanted=wanted)
        with naming(upload.part.param):
            try:
                done = twice(lambda: self._run(upload, source, known, stop))
            except LostFramesError:
                known = KnownVideo(partial(opened, survey=True), index, key, fps, recall=False)
                done = twice(lambda: self._run(upload, source, known, stop))
        self._count("decoded" if done.kept is None or done.kept else "frames")
        return done

    def _held(self, vision_root: bytes | None) -> Callable[[bytes, int], bool] | None:
        embedded = self.embedded
        if embedded is None or vision_root is None:
            return None
        return lambda digest, merge_size: embedded(embedding_key(vision_root, digest, merge_size))

    @releasing
    def _run(self, upload: _Upload, source: Any, known: KnownVideo | None, stop: Stop) -> Processed:
        part, options, processor = upload.part, upload.options, upload.processor
        if known is not None:
            with known as video, stop.timed("resize"):
                return processor.process(video, options)
        if isinstance(source, bytes):
            decoded = self._decoders.image(source, self._limits, stop)
            with decoded as pixels, stop.timed("resize"):
                return processor.process(pixels, options)
        if isinstance(source, FrameFiles):
            return processor.process(self._frames(part, source, options, stop), options)
        with self._converting:
            if part.modality == "image":
                return processor.process(_image_pixels(source, self._limits), options)
            return processor.process(ArrayVideo(source, options.fps, self._limits), options)

    def _frames(self, part: MediaPart, source: FrameFiles, options: Any, stop: Stop) -> ListedVideo:
        images = list(places(part, source.files))

        @contextlib.contextmanager
        def decode(index: int) -> Iterator[Pixels]:
            decoded = self._decoders.image(source.files[index], self._limits, stop)
            with naming(images[index].param), decoded as pixels:
                yield pixels

        return ListedVideo(decode, len(source.files), options.fps, self._limits, part.param)


@dataclass(frozen=True, slots=True)
class _Upload:
    """A medium as given by the client.

    Attributes:
        options: the effective ones.
        key_of: returns a key of the content, given its digest and options.
        keys: its keys in the raw index; none for pictures of Python callers.
        read: gets the bytes or the array.
        digest: of the content, if the bytes or the array are here.
    """

    part: MediaPart
    options: Any
    processor: Processor
    key_of: Callable[..., bytes]
    keys: tuple[bytes, ...]
    read: Callable[[Stop], Any]
    digest: bytes | None = None


def _image_pixels(source: Any, limits: MediaLimits) -> Pixels:
    if isinstance(source, np.ndarray):
        try:
            source = PIL.Image.fromarray(source)
        except (TypeError, ValueError):
            raise MediaError("the array is not a valid image") from None
    if isinstance(source, PIL.Image.Image):
        return image_to_rgb(source, limits)
    raise MediaError("an image must be a PIL image, an array, bytes, a path or a URL")


def _read_source(part: MediaPart, limits: MediaLimits, stop: Stop, hold: Hold | None = None) -> Any:
    """Return the bytes of a file, `FrameFiles`, or what a Python caller gave.

    Raises MediaFetchError, MediaError or InvalidRequestError, which name the part; OverloadedError
    if `hold` refuses; StoppedError.
    """
    with naming(part.param):
        return _read(part, limits, stop, hold)


def _read(part: MediaPart, limits: MediaLimits, stop: Stop, hold: Hold | None) -> Any:
    source = part.source
    is_image = part.modality == "image"
    max_bytes = limits.max_image_bytes if is_image else limits.max_video_bytes
    frames = frame_sources(source) if not is_image else None
    if frames is not None:
        check_frame_count(frames)
        read = (_read_source(frame, limits, stop, hold) for frame in places(part, frames))
        return FrameFiles(tuple(read))
    if isinstance(source, PdfPage):
        return source.packed
    if isinstance(source, MediaName):
        raise InvalidRequestError(
            f"{part.param}: media by {source.kind} are for chats, responses and messages of servers"
        )
    if isinstance(source, StoredUpload):
        if hold is not None:
            hold(source.num_bytes)
        try:
            return read_file(source.path, max_bytes)
        except OSError:  # deleted since it was looked up
            raise MediaNotHeldError(source, part.param) from None
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str) and (part.url_only or _SCHEME.match(source)):
        return fetch(source, max_bytes=max_bytes, limits=limits, stop=stop, hold=hold)
    if isinstance(source, str | Path):
        try:
            return read_file(Path(source), max_bytes)
        except (OSError, ValueError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            # No message holds a path; the name of the file tells several media apart.
            why = getattr(error, "strerror", None) or "no such path"
            said = f"the file {Path(source).name!r} cannot be read: {why}"
            raise MediaFetchError(said) from None
    if part.url_only:
        raise InvalidRequestError(f"{part.param} must be a URL")
    return source


def is_remote(part: MediaPart) -> bool:
    """Return True if loading the part waits for another machine, or reads a stored file."""
    sources = part.source if isinstance(part.source, list) else [part.source]
    return any(
        isinstance(source, StoredUpload)
        or (isinstance(source, str) and source[:5].lower().startswith("http"))
        for source in sources
    )


def _digest_of(source: Any) -> bytes | None:
    """Return `raw_digest` of what was read; None for pictures of Python callers."""
    if isinstance(source, FrameFiles):
        return raw_digest(source.packed)
    if isinstance(source, bytes) or _is_contiguous(source):
        return raw_digest(source)
    return None


def _is_data_url(source: Any) -> bool:
    """Return True for the text of a data: URL."""
    return isinstance(source, str) and source[:5].lower() == "data:" and source.isascii()


def _is_contiguous(source: Any) -> bool:
    return (
        isinstance(source, np.ndarray)
        and source.dtype == np.uint8
        and bool(source.flags.c_contiguous)
    )


def _elsewhere(stop: Stop, patches: Collection[int] | None) -> Processed:
    """Stand in for what decodes a medium in another process."""
    raise MediaError("the medium can be decoded in another process alone")


class LoadedMedia:
    """A `MediaItem` with a record and lazily decoded pixels.

    Args:
        record: grid, hashes and times.
        config: settings of the processor that made it.
        processed: the record with its pixels, or those of some spans; None if only the record is
            known.
        reload: decodes the pixels of some spans, or all if that is None, if some are missing;
            raises MediaError.
        waited: seconds spent on looking up the record outside of this process.
    """

    def __init__(
        self,
        record: MediaRecord,
        config: PictureConfig,
        processed: Processed | None,
        reload: Callable[[Stop, Collection[int] | None], Processed] | None = None,
        waited: float = 0.0,
    ) -> None:
        assert processed is not None or reload is not None
        self.record = record
        self.modality = record.modality
        self.grid = record.grid
        self.cut_short = record.cut_short
        self.patch_size = config.patch_size
        self.name = medium_hash(record.hashes)
        self.decoded = processed is not None
        self.waited = waited
        self._config = config
        self._parts = [processed] if processed is not None else []
        self._reload = reload
        self._reloaded = False
        self._other: Processed | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return all that another process can have. It is told how to decode by `decode_by`."""
        reload = self._reload  # before the pixels, of which it tells whether they are all
        given = {"_reload": None if reload is None else _elsewhere, "_other": None}
        kept = {**self.__dict__, **given}
        del kept["_lock"]
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def decode_by(self, reload: Callable[[Stop, Collection[int] | None], Processed]) -> None:
        """Decode missing pixels in another way from now on."""
        if self._reload is not None:
            self._reload = reload

    def pixels(self, stop: Stop, patches: Collection[int] | None = None) -> Processed:
        """Return what the argument `reload` of another process's copy has to. Raise as `load`
        does."""
        self.load(stop, patches)
        size = self._config.temporal_patch_size
        for part in self._parts:
            if part.kept is None or all(part.has(patch, size) for patch in patches or ()):
                return part
        self.load(stop)
        return self._parts[0]

    def patches(self, patch: int) -> torch.Tensor:
        """See `MediaItem.patches`."""
        return self._cut(normalise(self._frames(patch), self._config))

    def coded(self, patch: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `MediaItem.coded`."""
        table = value_table(self._config)
        return None if table is None else (self._cut(self._frames(patch)), table)

    def _cut(self, frames: torch.Tensor) -> torch.Tensor:
        count = self._config.temporal_patch_size
        return patchify(frames.expand(count, -1, -1, -1), self._config)

    def _frames(self, patch: int) -> torch.Tensor:
        """Return the pixels of a span, decoded if need be."""
        assert 0 <= patch < len(self.record.hashes)
        with self._lock:
            part = self._part(patch)
            if part is None:
                self._load(Stop(), None)
                part = self._part(patch)
        assert part is not None
        return part.frames(patch, self._config.temporal_patch_size)

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
        return self._reload is None

    def has(self, patch: int) -> bool:
        """See `MediaItem.has`."""
        return self._part(patch) is not None

    def _part(self, patch: int) -> Processed | None:
        size = self._config.temporal_patch_size
        return next((part for part in self._parts if part.has(patch, size)), None)

    def load(self, stop: Stop, patches: Collection[int] | None = None) -> None:
        """See `MediaItem.load`."""
        with self._lock:
            if patches is None or not all(map(self.has, patches)):
                self._load(stop, patches)

    def corrected(self) -> LoadedMedia:
        """Return a medium with the decoded content if it differs from the record, else this one."""
        with self._lock:
            other = self._other
        if other is None:
            return self
        return LoadedMedia(other.record, self._config, other, waited=self.waited)

    def _load(self, stop: Stop, patches: Collection[int] | None) -> None:
        """Decode spans; the second time all, so a medium is decoded three times at most."""
        if self._reload is None:
            return
        processed = self._other or self._reload(stop, None if self._reloaded else patches)
        if processed.record != self.record:
            self._other = processed
            raise UnconfirmedError("a medium no longer has the content it was recorded with")
        self._reloaded = self.decoded = True
        if processed.kept is None:
            self._parts, self._reload = [processed], None
        else:
            self._parts = [*self._parts, processed]
