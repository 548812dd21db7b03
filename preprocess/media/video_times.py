"""The times of a video file's frames, measured from its packets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from vlm_serve.preprocess.media.limits import DEFAULT_FPS

MAX_LEAP_SECONDS = 10.0
"""A transport stream's clock has started again if it leaps further ahead: behind joined recordings,
or a camera's pause. FFmpeg's command has the same bound."""
MAX_STEP_BACK_SECONDS = 0.1
"""After a larger step back a clock has started again, too."""
RATE_TOLERANCE = 0.01
"""By how much a header's rate may differ from the measured one and still be believed."""


@dataclass(frozen=True, slots=True)
class PacketTime:
    """One packet in decoding order: its presentation and decoding times, in units of the stream's
    time base, and whether its frame is shown."""

    pts: int | None
    dts: int | None
    shown: bool


def join_clocks(
    packets: Sequence[PacketTime], time_base: Fraction, *, may_leap: bool
) -> list[int | None]:
    """Return presentation times on one clock.

    After each new start of a file's clock the rest follows at once.

    Args:
        packets: in decoding order.
        time_base: seconds per unit.
        may_leap: the container's clock may also leap ahead, as that of MPEG streams.
    """
    back = -MAX_STEP_BACK_SECONDS / time_base
    ahead = MAX_LEAP_SECONDS / time_base if may_leap else None
    joined: list[int | None] = []
    offset, last, step = 0, None, 0
    for packet in packets:
        if packet.dts is not None:
            if last is not None:
                delta = packet.dts - last
                if delta < back or (ahead is not None and delta > ahead):
                    offset -= delta - max(step, 1)
                elif delta > 0:
                    step = delta
            last = packet.dts
        joined.append(None if packet.pts is None else packet.pts + offset)
    return joined


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """Times of frames.

    Attributes:
        seconds: of every frame, since the first one; ascending.
        fps: average frames per second.
        steady: the frames are `1 / fps` apart, as precisely as the file can say it.
    """

    seconds: Sequence[float]
    fps: float
    steady: bool

    @staticmethod
    def even(total: int, fps: float) -> FrameTimes:
        """Return the times of `total` frames at exactly this rate."""
        return FrameTimes([index / fps for index in range(total)], fps, True)


def measure(
    shown: Sequence[int] | None, total: int, time_base: Fraction | None, header_fps: float
) -> FrameTimes:
    """Return the times of a file's frames.

    The header's rate is used if the times agree with it, because it is exact and they are
    rounded. Otherwise the rate is `(n - 1) / (last - first)`.

    Args:
        shown: distinct, ascending times of all frames in units of `time_base`; None: unknown.
        total: number of frames.
        header_fps: the file's own rate; 0: none.
    """
    if shown is None or time_base is None:
        return FrameTimes.even(total, header_fps or DEFAULT_FPS)
    assert len(shown) == total
    unit = float(time_base)
    seconds = [(pts - shown[0]) * unit for pts in shown]
    length = seconds[-1]
    if not length:
        return FrameTimes(seconds, header_fps or DEFAULT_FPS, True)
    fps = (total - 1) / length
    claimed = (total - 1) / header_fps if header_fps else 0.0
    if abs(length - claimed) <= RATE_TOLERANCE * length + 2 * unit:
        fps = header_fps
    return FrameTimes(seconds, fps, _is_steady(seconds, fps, unit))


def _is_steady(seconds: Sequence[float], fps: float, unit: float) -> bool:
    """Return True if no frame is further from its place than a sixteenth of a frame and the
    rounding of the file's times."""
    most = 2 * unit + 1 / (16 * fps)
    return all(abs(time - index / fps) <= most for index, time in enumerate(seconds))


def strictly_ascending(times: Sequence[int]) -> bool:
    """Return True if sorted times are distinct."""
    return all(first < second for first, second in itertools.pairwise(times))
