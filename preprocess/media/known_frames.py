"""Remembers the frames of video files, so that another sampling decodes new ones only.

Kept are the times of all frames and the content hashes of the decoded ones. Pixels are not
kept. The key of a file covers its bytes, the tenant's salt, the processors and the decoders; the
key of a layout is the size after the resize (docs/architecture.md#identity).
"""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vlm_serve.preprocess.media.frames import Video
from vlm_serve.preprocess.media.images import Pixels
from vlm_serve.preprocess.media.video_times import FrameTimes
from vlm_serve.preprocess.sized_index import SizedIndex

Hashes = tuple[bytes, ...]
"""Content hashes of one frame: of the whole picture, then of its slices."""

# Memory of an entry, of a frame and of a hash: measured, rounded up.
_ENTRY_BYTES, _FRAME_BYTES, _HASH_BYTES = 1024, 160, 80


@dataclass(slots=True)
class _File:
    """One file: timelines by the rate that replaces its own, sizes (h, w) of frames as decoded, and
    by layout the hashes of frames."""

    timelines: dict[float | None, FrameTimes] = field(default_factory=dict)
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    layouts: dict[str, dict[int, Hashes]] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        times = sum(
            8 * len(timeline.seconds) + _FRAME_BYTES for timeline in self.timelines.values()
        )
        frames = [frame for layout in self.layouts.values() for frame in layout.values()]
        hashes = sum(map(len, frames))
        sizes = _FRAME_BYTES * len(self.sizes)
        return _ENTRY_BYTES + times + sizes + _FRAME_BYTES * len(frames) + _HASH_BYTES * hashes


class FrameIndex(SizedIndex[_File]):
    """Knowledge of video files, by key.

    Attributes:
        counts: frames of files that were "shown" to a model, of these "known" ones, whose pixels
            were not needed, and those "decoded" for the others.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, lambda file: file.cost)
        self.counts = Counter(shown=0, known=0, decoded=0)

    def timeline(self, key: bytes, fps: float | None) -> FrameTimes | None:
        """Return the times of a file's frames, if known."""
        with self._lock:
            return self._get(key).timelines.get(fps)

    def size(self, key: bytes, frame: int) -> tuple[int, int] | None:
        """Return (height, width) of a frame as decoded, if known."""
        with self._lock:
            return self._get(key).sizes.get(frame)

    def hashes(self, key: bytes, layout: str) -> dict[int, Hashes]:
        """Return a copy of the known hashes of a file's frames in a layout."""
        with self._lock:
            return dict(self._get(key).layouts.get(layout, {}))

    def learn(
        self,
        key: bytes,
        fps: float | None,
        timeline: FrameTimes,
        size: tuple[int, tuple[int, int]],
        layout: str,
        hashes: Mapping[int, Hashes],
    ) -> None:
        """Add the outcome of a sampling; drop the file if it is larger than the whole index.

        Args:
            size: a frame's number, and its (height, width) as decoded.
            hashes: of the decoded frames.
        """
        with self._lock:
            known = self._get(key)
            known.timelines[fps] = replace(timeline, seconds=array("d", timeline.seconds))
            known.sizes[size[0]] = size[1]
            known.layouts.setdefault(layout, {}).update(hashes)
            self.put(key, known)

    def count(self, **frames: int) -> None:
        """Add to `counts`."""
        with self._lock:
            self.counts.update(frames)

    def _get(self, key: bytes) -> _File:
        return self.get(key) or _File()


class FileVideo(Video, Protocol):
    """A `Video` of a file in a decoder."""

    num_decoded: int
    """Frames that were decoded for those that were asked for."""


class KnownVideo:
    """A `Video` from a file, with what is remembered of it; leave it by `with`.

    Args:
        opened: opens the file in a decoder; called when it must be.
        index: the memory of all files.
        key: of this file in the index.
        fps: replaces the file's own rate, so times depend on it.
        held: tells by a span's hash and merge size if its embedding is at hand; None: none is.
        recall: False decodes all that is asked for, and remembers it.
        wanted: numbers of the temporal patches whose pixels are needed; None: those of which no
            embedding is at hand.
    """

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[FileVideo]],
        index: FrameIndex,
        key: bytes,
        fps: float | None,
        *,
        held: Callable[[bytes, int], bool] | None = None,
        recall: bool = True,
        wanted: Collection[int] | None = None,
    ) -> None:
        self._opened, self._index, self._key, self._fps = opened, index, key, fps
        self._recall, self.wanted = recall, wanted
        self.held = held or (lambda *_: False)
        self._stack = contextlib.ExitStack()
        self._video: FileVideo | None = None

    def __enter__(self) -> KnownVideo:
        known = self._index.timeline(self._key, self._fps) if self._recall else None
        # A file that is cut short, or damaged, is never remembered.
        self.cut_short, self.sound = False, True
        if known is None:
            video = self._open()
            known = FrameTimes(video.times, video.fps, video.steady)
            self.cut_short = video.cut_short
        self._timeline = known
        self.fps, self.steady, self.times = known.fps, known.steady, known.seconds
        return self

    def __exit__(self, *error: Any) -> bool | None:
        self._video = None
        return self._stack.__exit__(*error)

    def _open(self) -> FileVideo:
        if self._video is None:
            self._video = self._stack.enter_context(self._opened())
        return self._video

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """See `Video.frames`."""
        video = self._open()
        yield from video.frames(indices)
        self.sound = video.sound
        self._index.count(decoded=video.num_decoded)

    def size(self, frame: int) -> tuple[int, int] | None:
        """Return (height, width) of a frame as decoded, if known."""
        return self._index.size(self._key, frame) if self._recall else None

    def hashes(self, layout: str) -> dict[int, Hashes]:
        """Return the known hashes of frames in a layout, by the frame's number."""
        return self._index.hashes(self._key, layout)

    def count(self, *, shown: int, known: int) -> None:
        """Count the frames of a sampling, see `FrameIndex.counts`."""
        self._index.count(shown=shown, known=known)

    def learn(
        self, size: tuple[int, tuple[int, int]], layout: str, hashes: Mapping[int, Hashes]
    ) -> None:
        """Remember decoded frames, see `FrameIndex.learn`; forget a file with signs of damage."""
        if self.sound and not self.cut_short:
            self._index.learn(self._key, self._fps, self._timeline, size, layout, hashes)
        else:
            self._index.remove(self._key)
