"""The result of `prepare`: frozen data that later stages only read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from vlm_serve.errors import FieldError, MediaError
from vlm_serve.preprocess.identity.keys import NO_ADAPTER, AdapterIdentity, Mark, PromptKeys
from vlm_serve.preprocess.reading.conversation import Modality
from vlm_serve.system.stopping import Stop

if TYPE_CHECKING:
    import torch  # an import of this module takes no second


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A run of placeholder tokens `[start, end)` for one input of the vision tower.

    This is an image, one temporal patch of a video, or one slice. Markers and timestamps around the
    run are text and belong to no span.
    """

    start: int
    end: int
    modality: Modality
    content_hash: bytes
    """32-byte BLAKE3 over the post-resize pixels, and over what else decides its tokens' positions
    (docs/architecture.md#identity)."""
    grid: tuple[int, int, int]
    """(1, h, w) in patches, before spatial merging."""
    item: int
    """Index into `Prompt.media`."""
    patch: int
    """Index of the span in its item: a temporal patch, or a whole picture or slice; 0 for an image
    without slices."""
    merge_size: int
    """Patches per side that form one token."""
    pixels: bytes = b""
    """The hash of its pixels alone, which names its embeddings; empty: the content hash."""
    time: float = 0
    """Positions, mostly an int, between the first temporal patch of its video and this one."""


class UnconfirmedError(MediaError):
    """The record of an upload does not match its decoded content.

    `Prompt.corrected` prepares the prompt again from the decoded content.
    """


class MediaItem(Protocol):
    """One image or video of a prompt, in prompt order. Pixels may be decoded lazily."""

    modality: Modality
    grid: tuple[int, int, int]
    """(t, h, w) in patches; of the whole pictures if there are slices as well."""
    decoded: bool
    """True if this request had to decode the medium (False: known from the raw index)."""
    cut_short: bool
    """True for a file of which a part is missing or does not decode; the medium is the rest."""
    patch_size: int
    """Pixels per side of a patch."""

    @property
    def name(self) -> str:
        """Return the hash of the whole medium, see `medium_hash`."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of its pixels, decoded or not."""
        ...

    @property
    def ready(self) -> bool:
        """True if `patches` needs no more decoding."""
        ...

    def has(self, patch: int) -> bool:
        """Return True if `patches` needs no more decoding for a span."""
        ...

    def load(self, stop: Stop, patches: Collection[int] | None = None) -> None:
        """Decode what is missing; slow, but ends when the stop is set.

        Args:
            patches: the spans whose pixels are needed; None: all.

        Raises as `patches` does: UnconfirmedError if the medium does not have the recorded content.
        """
        ...

    def patches(self, patch: int) -> torch.Tensor:
        """Return the normalised pixels of span `patch`.

        They are float32 `[h * w, channels * temporal_patch_size * patch_size**2]`, in the order of
        the model's vision tower. Deterministic, thread-safe. Raises MediaError if a lazily decoded
        medium does not have the recorded content hash.
        """
        ...

    def coded(self, patch: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the same as uint8 pixels of that shape and a table, float32 `[channels, 256]`, of
        what `patches` has for each value of a channel; None if there is no such table."""
        ...


SharedTokens = Callable[[Mapping[str, Any], Sequence[int]], int]
"""Returns the number of leading tokens that a prompt and its answer, a message with its tokens,
share with the next turn's prompt, see `SharedByNextTurn`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt with everything needed for identity, matching and M-RoPE."""

    token_ids: tuple[int, ...]
    positions: torch.Tensor
    """int64 `[3, len]`: temporal, height and width position of every token; float64 where a time
    gives fractions."""
    rope_delta: float
    """The position of a generated token at index i is `i + rope_delta` on all three axes; an int,
    unless positions are float64."""
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
    """Length of the prefix shared with the next turn's rendering; 0: unknown."""
    marks: tuple[Mark, ...] = ()
    """Cut points that the client asks to be kept for a time, ascending."""
    owner: bytes = b""
    """Key of the tenant without an adapter, see `Owners`: whose pins the marks are."""
    uncached: bool = False
    """The client wants nothing read from the cache, and nothing written."""
    waited: float = field(default=0.0, compare=False)
    """Seconds spent waiting for lookups of its uploads outside of this process."""
    adapter: AdapterIdentity = NO_ADAPTER
    """The adapter of the weights under whose root its keys are."""
    next_turn: SharedTokens | None = field(default=None, repr=False, compare=False)
    """Tells how much of the prompt and its answer the next turn shares; None without messages."""
    text: str = field(default="", repr=False)
    """The rendered template before expansion; for logs and debugging."""
    corrected: Callable[[], Prompt] | None = field(default=None, repr=False, compare=False)
    """Prepares the prompt again after an UnconfirmedError, from the decoded content. None if no
    medium is known by its record alone."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def last_tokens(self, count: int | None) -> Prompt:
        """Return the prompt of the last `count` tokens alone; None: of all.

        Raises InvalidRequestError for a prompt with media, since a medium cannot be cut.
        """
        dropped = 0 if count is None else len(self) - count
        if dropped <= 0:
            return self
        if self.media:
            raise FieldError("truncate_prompt_tokens", "is not possible for a prompt with media")
        ids = self.token_ids[dropped:]
        return replace(
            self,
            token_ids=ids,
            positions=self.positions[:, :count],  # Text has the same positions in any prompt.
            keys=self.keys.of_text(ids),
            message_ends=tuple(end - dropped for end in self.message_ends if end > dropped),
            system_end=0,
            stable_end=max(self.stable_end - dropped, 0),
            marks=(),
            next_turn=None,
        )
