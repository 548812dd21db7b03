"""What `prepare` returns: frozen data that every later stage reads and none changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.keys import PromptKeys
from vlm_serve.preprocess.stopping import Stop

Modality = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A run of placeholder tokens `[start, end)`, for what the vision tower sees at once: an image,
    one temporal patch of a video, one slice.

    Markers and timestamps around the run are text and belong to no span.
    """

    start: int
    end: int
    modality: Modality
    content_hash: bytes
    """32-byte BLAKE3 over the post-resize pixels (docs/architecture.md#identity)."""
    grid: tuple[int, int, int]
    """(1, h, w) in patches, before spatial merging."""
    item: int
    """Index into `Prompt.media`."""
    patch: int
    """Which of its item's spans it is: temporal patches, or whole pictures with their slices; 0
    for an image that is one span."""
    merge_size: int
    """Patches per side that one token stands for."""


class UnconfirmedError(MediaError):
    """What was recorded of an upload is not what decoding it gives. `Prompt.corrected` goes by what
    it gives."""


class MediaItem(Protocol):
    """One image or video of a prompt, in prompt order. Pixels may be decoded lazily."""

    modality: Modality
    grid: tuple[int, int, int]
    """(t, h, w) in patches; of whole pictures where there are slices as well."""
    decoded: bool
    """True if this request had to decode the medium (False: known from the raw index)."""

    @property
    def num_bytes(self) -> int:
        """Of its pixels, decoded or not."""
        ...

    @property
    def ready(self) -> bool:
        """True if `patches` needs no decoding any more."""
        ...

    def load(self, stop: Stop) -> None:
        """Decodes what is missing; slow, but ends with the stop. Raises what `patches` raises:
        UnconfirmedError if the medium does not have the recorded content."""
        ...

    def patches(self, patch: int) -> torch.Tensor:
        """Normalised pixels of span `patch`: float32
        `[h * w, channels * temporal_patch_size * patch_size**2]`, in the order that the model's
        vision tower takes.
        Deterministic, thread-safe. Raises MediaError if a lazily decoded medium does not have the
        recorded content hash."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt with everything that identity, matching and M-RoPE need."""

    token_ids: tuple[int, ...]
    positions: torch.Tensor
    """int64 `[3, len]`: temporal, height and width position of every token."""
    rope_delta: int
    """Position of a generated token with index i is `i + rope_delta` on all three axes."""
    keys: PromptKeys
    """Block keys, tail keys and cut points (docs/architecture.md#identity)."""
    spans: tuple[MediaSpan, ...] = ()
    """Sorted by start, disjoint."""
    media: tuple[MediaItem, ...] = ()
    media_ends: tuple[int, ...] = ()
    """Position after the last span of every media item."""
    message_ends: tuple[int, ...] = ()
    """Position after the end-of-turn token of every message, in order."""
    system_end: int = 0
    """Position after the end-of-turn token of a leading system message, else 0."""
    stable_end: int = 0
    """Length of the prefix that the next turn's rendering shares with this one; 0: unknown."""
    waited: float = field(default=0.0, compare=False)
    """Seconds that its preparation has waited for what others know of its uploads."""
    text: str = field(default="", repr=False)
    """The rendered template before expansion; for logs and debugging."""
    corrected: Callable[[], Prompt] | None = field(default=None, repr=False, compare=False)
    """After an UnconfirmedError: prepares the prompt again, with what decoding has given. None if
    nothing in it is known from records alone."""

    def __len__(self) -> int:
        return len(self.token_ids)
