"""A medium of a prompt: its record, and its pixels once they are needed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection

import torch

from vlm_serve.preprocess.identity.prompt import UnconfirmedError
from vlm_serve.preprocess.media.processing import MediaRecord, Processed
from vlm_serve.preprocess.media.processors import PictureConfig, normalise, patchify
from vlm_serve.system.stopping import Stop


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
        self.decoded = processed is not None
        self.waited = waited
        self._config = config
        self._parts = [processed] if processed is not None else []
        self._reload = reload
        self._reloaded = False
        self._other: Processed | None = None
        self._lock = threading.Lock()

    def patches(self, patch: int) -> torch.Tensor:
        """See `MediaItem.patches`."""
        assert 0 <= patch < len(self.record.hashes)
        count = self._config.temporal_patch_size
        with self._lock:
            part = self._part(patch)
            if part is None:
                self._load(Stop(), None)
                part = self._part(patch)
        assert part is not None
        frames = normalise(part.frames(patch, count), self._config)
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
