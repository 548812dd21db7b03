"""Sampling on a fixed grid: a longer recording keeps the frames, sizes and hashes of a shorter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conversation import recorded
from hypothesis import given
from hypothesis import strategies as st

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media.sampling import grid_indices
from vlm_serve.preprocess.prepare import Preprocessor


def frames(count: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (count, 48, 64, 3), dtype=np.uint8)


def ask(preprocessor: Preprocessor, video: Any, **options: Any) -> Prompt:
    part = {"type": "video", "video": video, "sampling": "fps_grid", **options}
    return preprocessor.prepare([{"role": "user", "content": [part]}])


times = st.lists(st.floats(0.01, 2.0), min_size=1, max_size=40).map(
    lambda gaps: [float(t) for t in np.cumsum([0.0, *gaps])]
)


@given(times, st.sampled_from([0.3, 1.0, 2.0, 7.0]))
def test_frame_k_is_the_first_at_or_after_its_moment(moments: list[float], fps: float) -> None:
    found = grid_indices(moments, fps, 10_000)
    for k, index in enumerate(found):
        assert moments[index] >= k / fps - 1e-6
        assert index == 0 or moments[index - 1] < k / fps
    assert moments[-1] < len(found) / fps  # there is no further frame


@given(times, st.integers(1, 40), st.sampled_from([0.3, 1.0, 2.0]))
def test_a_longer_video_keeps_the_frames(moments: list[float], length: int, fps: float) -> None:
    short = grid_indices(moments[:length], fps, 10_000)
    assert grid_indices(moments, fps, 10_000)[: len(short)] == short


def test_regular_rates_hit_every_grid_point() -> None:
    moments = [index / 30 for index in range(300)]
    assert grid_indices(moments, 2.0, 100) == list(range(0, 300, 15))
    ntsc = [index * 1001 / 30000 for index in range(300)]
    assert grid_indices(ntsc, 2.0, 100)[:4] == [0, 15, 30, 45]


def test_growing_frames_share_prefix_and_hashes(preprocessor: Preprocessor) -> None:
    whole = frames(40)
    prompts = [ask(preprocessor, whole[:count], fps=8) for count in (12, 24, 36, 40)]
    for short, long in zip(prompts, prompts[1:], strict=False):
        # The last patch of the shorter one may be half full; all others stay.
        kept = len(short.spans) - 1
        assert short.spans[:kept] == long.spans[:kept]
        end = short.spans[kept - 1].end
        assert short.token_ids[:end] == long.token_ids[:end]
        assert torch.equal(short.positions[:, :end], long.positions[:, :end])
        assert short.keys.block_keys[: end // 16] == long.keys.block_keys[: end // 16]
        if end % 16:
            assert short.keys.tails[end] == long.keys.tails[end]
        assert short.spans[0].grid == long.spans[0].grid
    # With uniform sampling nothing of the kind holds: frame times follow the length.
    uniform = [
        preprocessor.prepare(
            [{"role": "user", "content": [{"type": "video", "video": whole[:n], "fps": 8}]}]
        )
        for n in (24, 40)
    ]
    assert uniform[0].spans[1].content_hash != uniform[1].spans[1].content_hash


def test_growing_files_share_hashes_with_each_other_and_with_frames(
    preprocessor: Preprocessor,
) -> None:
    whole = frames(40)
    short, long = (ask(preprocessor, recorded(whole[:count], 8)) for count in (24, 40))
    plain = ask(preprocessor, whole, fps=8)
    assert [s.content_hash for s in short.spans] == [s.content_hash for s in long.spans[:3]]
    assert [s.content_hash for s in long.spans] == [s.content_hash for s in plain.spans]
    assert long.token_ids == plain.token_ids


def test_timestamps_are_those_of_the_grid(preprocessor: Preprocessor) -> None:
    prompt = ask(preprocessor, frames(40), fps=8, sample_fps=4)
    text = preprocessor.tokenizer.decode(prompt.token_ids)
    shown = [f"<{seconds:.1f} seconds>" for seconds in (0.125, 0.625, 1.125)]
    assert all(stamp in text for stamp in shown)
    assert len(prompt.spans) == 10


def test_size_depends_on_the_frame_and_its_cap_alone(preprocessor: Preprocessor) -> None:
    big = np.repeat(np.repeat(frames(16), 8, axis=1), 8, axis=2)
    grids = {ask(preprocessor, big[:n], fps=8).spans[0].grid for n in (2, 8, 16)}
    assert len(grids) == 1
    small = ask(preprocessor, big[:2], fps=8, max_frame_pixels=4096).spans[0].grid
    assert small[1] * small[2] * 64 <= 4096
    larger = ask(preprocessor, big[:2], fps=8, max_frame_pixels=40_000).spans[0].grid
    assert 4096 < larger[1] * larger[2] * 64 <= 40_000


def test_what_is_over_the_budget_is_refused(preprocessor: Preprocessor) -> None:
    video = frames(200)
    with pytest.raises(MediaError, match="over 10 frames"):
        ask(preprocessor, video, fps=8, max_frames=10)
    assert len(ask(preprocessor, video[:40], fps=8, max_frames=10).spans) == 5
    big = np.repeat(np.repeat(video, 6, axis=1), 6, axis=2)
    with pytest.raises(MediaError, match="budget"):
        ask(preprocessor, big, fps=8, sample_fps=8, max_frame_pixels=110_000)


def test_a_single_frame(preprocessor: Preprocessor) -> None:
    prompt = ask(preprocessor, frames(1), fps=8)
    assert len(prompt.spans) == 1
    assert "<0.0 seconds>" in preprocessor.tokenizer.decode(prompt.token_ids)
