"""Decodes, resizes and hashes the sampled frames of a video, as far as they are not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from vlm_serve.preprocess.known_frames import Hashes, KnownVideo
from vlm_serve.preprocess.media_frames import Video
from vlm_serve.preprocess.media_image import Pixels

Pictures = tuple[torch.Tensor, ...]
"""One frame as the model sees it: the whole picture, then its slices."""


class Layout(Protocol):
    """Size and cut of all frames of a sampling."""

    @property
    def key(self) -> str:
        """Everything that decides the pictures of a frame, besides the processor."""
        ...

    @property
    def merge_size(self) -> int:
        """Patches per side of one token."""
        ...

    def pictures(self, frame: Pixels) -> Pictures:
        """Resize and cut one frame."""
        ...

    def hashes(self, pictures: Pictures) -> Hashes:
        """Return the content hashes of a frame."""
        ...

    def spans(self, frames: Sequence[Hashes]) -> Hashes:
        """Return the hashes of the spans of frames that belong together."""
        ...


L = TypeVar("L", bound=Layout)


@dataclass(frozen=True, slots=True)
class Sampled(Generic[L]):
    """Frames of a video.

    Attributes:
        hashes: of all spans.
        kept: places in the sampling of the decoded frames, ascending; None: these are all.
        pictures: of those.
    """

    layout: L
    hashes: Hashes
    kept: Sequence[int] | None
    pictures: list[Pictures]


def sample(
    video: Video, indices: Sequence[int], together: int, lay_out: Callable[[int, int], L]
) -> Sampled[L]:
    """Return frames; resize and hash each while later ones are decoded.

    Nothing is decoded if the hashes of all frames are known. Otherwise frames are decoded unless
    their spans are known and have their embeddings at hand: those that need pixels are decoded
    once, with the new ones.

    Args:
        indices: of the frames, ascending.
        together: frames of a span; their pixels are needed together.
        lay_out: returns the layout of all frames from (height, width) of the first one.

    Raises as `Video.frames` and `lay_out` do.
    """
    memory = video if isinstance(video, KnownVideo) else None
    groups = [indices[at : at + together] for at in range(0, len(indices), together)]
    kept: Sequence[int] = range(len(indices))
    hashes: dict[int, Hashes] = {}
    layout: L | None = None
    size = memory.size(indices[0]) if memory is not None else None
    if memory is not None and size is not None:
        layout = lay_out(*size)
        hashes = memory.hashes(layout.key)
        kept = list(_places_to_decode(groups, together, layout, hashes, memory))
    pictures: list[Pictures] = []
    made: dict[int, Hashes] = {}
    if kept:
        wanted = [indices[place] for place in kept]
        for index, frame in zip(wanted, video.frames(wanted), strict=True):
            if layout is None:
                size = frame.shape[0], frame.shape[1]
                layout = lay_out(*size)
            pictures.append(layout.pictures(frame))
            made[index] = layout.hashes(pictures[-1])
    assert layout is not None and size is not None
    if memory is not None:
        memory.count(shown=len(indices), known=len(indices) - len(kept))
        if made:
            memory.learn((indices[0], size), layout.key, made)
    hashes = hashes | made
    spans = [layout.spans([hashes[index] for index in group]) for group in groups]
    some = kept if len(kept) < len(indices) else None
    return Sampled(layout, tuple(each for span in spans for each in span), some, pictures)


def _places_to_decode(
    groups: Sequence[Sequence[int]],
    together: int,
    layout: Layout,
    hashes: dict[int, Hashes],
    memory: KnownVideo,
) -> Iterator[int]:
    wanted = memory.wanted
    if wanted is None and all(index in hashes for group in groups for index in group):
        return
    for number, group in enumerate(groups):
        if all(index in hashes for index in group):
            spans = layout.spans([hashes[index] for index in group])
            at_hand = all(memory.held(span, layout.merge_size) for span in spans)
            if at_hand if wanted is None else number not in wanted:
                continue
        yield from range(number * together, number * together + len(group))
