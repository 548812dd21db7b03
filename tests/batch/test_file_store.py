"""Writing files of batches beside cancellations."""

from __future__ import annotations

import asyncio

import pytest

from vlm_serve.batch.file_store import settled


def test_work_that_is_cancelled_again_and_again_is_waited_for_all_the_same() -> None:
    """A row that is being written when its batch ends is cancelled twice."""
    ended: list[str] = []

    async def run() -> None:
        gate = asyncio.Event()

        async def work() -> None:
            await gate.wait()
            ended.append("work")

        task = asyncio.ensure_future(settled(work()))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert ended == ["work"]
