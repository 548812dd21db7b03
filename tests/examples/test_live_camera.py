"""The example of a recording that grows: every question reuses what was seen before."""

from __future__ import annotations

import live_camera

from vlm_serve import Pipeline


def test_each_recording_reuses_the_one_before() -> None:
    with Pipeline("demo") as pipe:
        seen = list(live_camera.watch(pipe, live_camera.CAMERA))
    assert [seconds for seconds, _ in seen] == sorted(seconds for seconds, _ in seen)
    assert len(seen) >= 3
    assert seen[-1][1].text == "A red circle turns blue at second 4."
    for (_, before), (_, output) in zip(seen, seen[1:], strict=False):
        # All but the question of the one before, which begins behind its video.
        assert output.usage.cached_tokens >= before.usage.prompt_tokens - 12
        assert output.cache_report.reason == "media_grown"
        assert output.usage.prompt_tokens > before.usage.prompt_tokens
