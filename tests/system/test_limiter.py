"""Tasks of one request on a shared executor, a few at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from vlm_serve.system.stopping import ConcurrencyLimiter


class Gate:
    """Work that waits until it may go on; counts how much of it is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.open = threading.Event()
        self.inside = self.most_inside = 0

    def work(self) -> int:
        with self._lock:
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        assert self.open.wait(30)
        with self._lock:
            self.inside -= 1
        return 1


def test_a_request_with_much_work_leaves_threads_to_others() -> None:
    gate = Gate()
    with ThreadPoolExecutor(4) as executor:
        many = ConcurrencyLimiter(executor, [gate.work] * 100, limit=3)
        (other,) = ConcurrencyLimiter(executor, [lambda: "done"], limit=3).futures
        assert other.result(timeout=30) == "done"
        assert not any(each.done() for each in many.futures)
        gate.open.set()
        assert sum(each.result(timeout=30) for each in many.futures) == 100
    assert gate.most_inside <= 3


def test_results_and_errors_are_those_of_the_pieces_in_order() -> None:
    with ThreadPoolExecutor(2) as executor:
        works = [lambda n=n: 6 // (n - 2) for n in range(4)]
        futures = ConcurrencyLimiter(executor, works, limit=2).futures
        assert [futures[n].result(timeout=30) for n in (0, 1, 3)] == [-3, -6, 6]
        with pytest.raises(ZeroDivisionError):
            futures[2].result(timeout=30)


def test_what_is_cancelled_before_its_turn_is_never_begun() -> None:
    gate, begun = Gate(), list[int]()
    with ThreadPoolExecutor(1) as executor:
        works: list[Callable[[], object]] = [
            gate.work,
            lambda: begun.append(1),
            lambda: begun.append(2),
        ]
        futures = ConcurrencyLimiter(executor, works, limit=1).futures
        assert futures[1].cancel()
        gate.open.set()
        futures[2].result(timeout=30)
    assert begun == [2]


@pytest.mark.parametrize("most", [1, 2, 8])
def test_an_executor_that_ends_cancels_what_is_left(most: int) -> None:
    """Some pieces run, some wait in the executor, others have not come to it yet."""
    gate = Gate()
    executor = ThreadPoolExecutor(1)
    futures = ConcurrencyLimiter(executor, [gate.work] * 10, most).futures
    executor.shutdown(wait=False, cancel_futures=True)
    gate.open.set()
    assert futures[0].result(timeout=30) == 1
    for each in futures[1:]:
        with pytest.raises(CancelledError):
            each.result(timeout=30)


def test_no_work() -> None:
    with ThreadPoolExecutor(1) as executor:
        assert ConcurrencyLimiter(executor, [], limit=2).futures == []
