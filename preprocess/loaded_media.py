"""A medium of a prompt: its record, and its pixels once they are needed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from vlm_serve.preprocess.media_process import MediaRecord, Processed
from vlm_serve.preprocess.processors import PictureConfig, normalise, patchify
from vlm_serve.preprocess.prompt import UnconfirmedError
from vlm_serve.preprocess.stopping import Stop


class LoadedMedia:
    """A `MediaItem` with a record and lazily decoded pixels.

    Args:
        record: grid, hashes and times.
        config: settings of the processor that made it.
        processed: the record with its pixels, or those of some spans; None if only the record is
            known.
        reload: decodes all pixels, if some are missing; raises MediaError.
        waited: seconds spent on looking up the record outside of this process.
    """

    def __init__(
        self,
        record: MediaRecord,
        config: PictureConfig,
        processed: Processed | None,
        reload: Callable[[Stop], Processed] | None = None,
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
        self._processed = processed
        self._reload = reload
        self._other: Processed | None = None
        self._lock = threading.Lock()

    def patches(self, patch: int) -> torch.Tensor:
        """See `MediaItem.patches`."""
        assert 0 <= patch < len(self.record.hashes)
        count = self._config.temporal_patch_size
        processed = self._get_processed(Stop(), patch)
        frames = normalise(processed.frames(patch, count), self._config)
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
        return self._processed is not None and self._reload is None

    def has(self, patch: int) -> bool:
        """See `MediaItem.has`."""
        processed = self._processed
        return processed is not None and processed.has(patch, self._config.temporal_patch_size)

    def load(self, stop: Stop) -> None:
        """See `MediaItem.load`."""
        self._get_processed(stop)

    def corrected(self) -> LoadedMedia:
        """Return a medium with the decoded content if it differs from the record, else this one."""
        with self._lock:
            other = self._other
        if other is None:
            return self
        return LoadedMedia(other.record, self._config, other, waited=self.waited)

    def _get_processed(self, stop: Stop, patch: int | None = None) -> Processed:
        """Return all pixels, or at least those of one span."""
        with self._lock:
            processed = self._processed
            if processed is not None and patch is not None and self.has(patch):
                return processed
            if self._reload is not None:
                processed = self._other or self._reload(stop)
                if processed.record != self.record:
                    self._other = processed
                    raise UnconfirmedError(
                        "a medium no longer has the content it was recorded with"
                    )
                self._processed, self._reload, self.decoded = processed, None, True
            assert self._processed is not None
            return self._processed
