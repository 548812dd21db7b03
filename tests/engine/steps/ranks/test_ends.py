"""A rank that ends, or is stopped, or cannot start: one sentence, in time, and nothing is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from parity import executor_of, greedy
from parity_cases import random_ids
from process_tree import children_of, processes_below
from rank_processes import rank_processes
from server_process import server_process
from serving import wait_for

from vlm_serve.cli import main
from vlm_serve.engine.steps.ranks.executor import ShardedExecutor
from vlm_serve.engine.steps.ranks.process import RankProcesses
from vlm_serve.errors import ConfigError, EngineClosedError, EngineError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

CONFIG = EngineConfig(block_size=16, cache_memory="16MiB", tensor_parallel_size=2, threads=1)
PATIENCE = 60.0


@pytest.fixture
def pipe() -> Iterator[Pipeline]:
    with Pipeline("demo", CONFIG) as made:
        yield made


def _pids(pipe: Pipeline) -> list[int]:
    executor = executor_of(pipe.engine)
    assert isinstance(executor, ShardedExecutor)
    return [process.pid for process in executor._processes]


def _left(folder: str = "/dev/shm") -> set[str]:
    """Files of this process: others may be starting ranks."""
    own = f"vlm-serve-ranks-{os.getpid()}-"
    return {each for each in os.listdir(folder) if each.startswith(own)}


def _workers() -> list[int]:
    """Children of this process that are ranks."""
    return [pid for pid, line in children_of(os.getpid()).items() if "ranks.worker" in line]


def _wait_for_end(pipe: Pipeline) -> None:
    deadline = time.monotonic() + PATIENCE
    while pipe.engine.alive:
        assert time.monotonic() < deadline, "the engine goes on without its rank"
        time.sleep(0.02)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_rank_that_dies_ends_an_idle_engine(
    pipe: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    pipe.generate(random_ids(20, 1), greedy(2))
    (pid,) = _pids(pipe)
    os.kill(pid, signal.SIGKILL)
    _wait_for_end(pipe)
    assert [each.message for each in caplog.records if each.levelname == "CRITICAL"] == [
        "the engine ends: rank 1 was ended by SIGKILL"
    ]


def test_a_rank_that_dies_ends_whoever_waits_for_an_answer(pipe: Pipeline) -> None:
    (pid,) = _pids(pipe)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(EngineClosedError, match="rank 1 was ended by SIGKILL") as caught:
        for seed in range(10_000):
            pipe.generate(random_ids(50, seed), greedy(30))
    assert (caught.value.status, caught.value.code) == (503, "engine_stopped")
    _wait_for_end(pipe)


def test_how_a_rank_ended_is_said_by_whoever_notices_first(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is closed before anybody has told the engine."""
    executor = executor_of(pipe.engine)
    assert isinstance(executor, ShardedExecutor)
    monkeypatch.setattr(executor._processes, "_lost", lambda sentence: None)
    (pid,) = _pids(pipe)
    os.kill(pid, signal.SIGKILL)
    # A step that begins before its end would wait for it as long as for one that is slow.
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(EngineClosedError, match="rank 1 was ended by SIGKILL"):
        pipe.generate(random_ids(50, 1), greedy(3))
    _wait_for_end(pipe)


def test_a_rank_that_is_stopped_is_not_waited_for_longer_than_said() -> None:
    with Pipeline("demo", replace(CONFIG, stall_timeout=2.0)) as pipe:
        (pid,) = _pids(pipe)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineClosedError, match="rank 1 has not answered for 2 s"):
            pipe.generate(random_ids(50, 1), greedy(3))
        _wait_for_end(pipe)
    assert _gone(pid)


def test_nothing_is_left_after_an_end() -> None:
    before = _left()
    with Pipeline("demo", CONFIG) as pipe:
        pids = _pids(pipe)
        assert _left() == before, "nobody else could open it, and nobody has to remove it"
    assert all(_gone(pid) for pid in pids)


def test_ranks_end_with_a_server_that_is_killed() -> None:
    arguments = ("demo", "--tensor-parallel-size", "2", "--threads", "1")
    with server_process(*arguments, "--cache-memory", "16MiB") as server:
        below = processes_below(server.process.pid)
        pids = [pid for pid, line in below.items() if "ranks.worker" in line]
        assert len(pids) == 1
        server.process.kill()
        deadline = time.monotonic() + PATIENCE
        while not all(_gone(pid) for pid in pids):
            assert time.monotonic() < deadline, "a rank has outlived its server"
            time.sleep(0.05)


def test_a_server_ends_with_its_engine() -> None:
    """Leave the start of another to whoever supervises it: until then every answer is a 503."""
    arguments = ("demo", "--tensor-parallel-size", "2", "--threads", "1", "--cache-memory", "16MiB")
    body = {"prompt": "One, two,", "max_tokens": 2000, "ignore_eos": True}
    with (
        server_process(*arguments) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as client,
        ThreadPoolExecutor() as pool,
    ):
        (pid,) = (
            pid
            for pid, line in processes_below(server.process.pid).items()
            if "ranks.worker" in line
        )
        asking = pool.submit(client.post, "/v1/completions", json=body)
        wait_for(lambda: client.get("/load").json()["num_requests_running"] == 1, PATIENCE)
        os.kill(pid, signal.SIGKILL)
        answer = asking.result(PATIENCE)
        error = answer.json()["error"]
        assert answer.status_code == 503 and "Retry-After" in answer.headers
        assert (error["message"], error["code"]) == (
            "rank 1 was ended by SIGKILL",
            "engine_stopped",
        )
        assert server.process.wait(PATIENCE) == 1


def test_a_step_that_fails_on_one_rank_fails_alone() -> None:
    with Pipeline("demo", CONFIG) as pipe:
        executor = executor_of(pipe.engine)
        forward, left = executor._forward, [1]

        def faulty(batch: object) -> object:
            if left[0]:
                left[0] -= 1
                raise MemoryError("no memory for this step")
            return forward(batch)  # type: ignore[arg-type]

        executor._forward = faulty  # type: ignore[method-assign, assignment]
        prompt = random_ids(50, 1)
        first = pipe.generate(prompt, greedy(5)).token_ids
        assert left == [0]
        assert pipe.generate(prompt, greedy(5)).token_ids == first
        pipe.engine.check()


def test_a_step_that_fails_in_a_process_group_ends_the_engine() -> None:
    """Its collectives carry no number: the next step's would meet those of the failed one."""
    with Pipeline("demo", replace(CONFIG, compiled_kernels=False)) as pipe:
        executor = executor_of(pipe.engine)
        forward, left = executor._forward, [1]

        def faulty(batch: object) -> object:
            if left[0]:
                left[0] -= 1
                raise MemoryError("no memory for this step")
            return forward(batch)  # type: ignore[arg-type]

        executor._forward = faulty  # type: ignore[method-assign, assignment]
        begin = time.monotonic()
        with pytest.raises(EngineClosedError, match="cannot begin again: no memory for this step"):
            pipe.generate(random_ids(50, 1), greedy(5))
        assert time.monotonic() - begin < CONFIG.stall_timeout
        _wait_for_end(pipe)


def test_a_rank_that_cannot_load_its_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlm_serve.engine.steps.ranks import start
    from vlm_serve.engine.steps.ranks.task import RankTask

    with rank_processes(2) as processes:
        send = processes._all[0].send

        def elsewhere(name: str, task: RankTask) -> None:
            source = replace(task.source, path=Path("/nonexistent"))
            send(name, replace(task, source=source))

        monkeypatch.setattr(processes._all[0], "send", elsewhere)
        monkeypatch.setattr(start, "RankProcesses", lambda count: processes)
        with pytest.raises(EngineError, match="rank 1: "):
            Pipeline("demo", CONFIG)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tensor-parallel-size", "3"), "4 linear key heads cannot be split over 3 ranks"),
        (("--tensor-parallel-size", "0"), "tensor_parallel_size must be at least 1"),
        (("--tensor-parallel-size", "2", "--cuda-graphs"), "cuda_graphs"),
    ],
)
def test_bad_sizes_are_one_sentence_at_start(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(["serve", "demo", "--port", "0", *options])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from vlm_serve.engine.steps.ranks.start import _devices

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but this machine has 1 GPU"):
        _devices(torch.device("cuda"), 2)


def test_ranks_take_the_gpus_from_the_named_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from vlm_serve.engine.steps.ranks.start import _devices

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert _devices(torch.device("cuda"), 2) == [torch.device("cuda", each) for each in (0, 1)]
    assert _devices(torch.device("cuda", 2), 2) == [torch.device("cuda", each) for each in (2, 3)]
    with pytest.raises(ConfigError, match="has 1 GPUs from cuda:3 on"):
        _devices(torch.device("cuda", 3), 2)


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(EngineError, match="a rank could not be started: No such file"):
        RankProcesses(1)


def test_an_engine_that_does_not_fit_leaves_no_rank_behind() -> None:
    before = _workers()
    with pytest.raises(ConfigError, match="raise cache_memory"):
        Pipeline("demo", replace(CONFIG, cache_memory="1KiB"))
    assert _workers() == before and not _left()
