"""Run every kernel many times on equal inputs on the GPU at hand and compare the bits.

    python benchmarks/gpu_repeats.py [--runs 50] [--small] [--share 1/4] [--device cpu]

A race inside a kernel, or a value that nothing wrote, shows as other bits in some run. Before each
run the memory that outputs are taken from is filled with NaN. Beside every second run another
stream multiplies matrices, so that the timing of programs differs. `--small` takes one small case
of each kernel once, for compute-sanitizer. Exits with 1 if any bits differ or are NaN.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import islice

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from common.gpu_calls import Case, calls

POISONED = 256 << 20


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return tensor.detach().contiguous().view(torch.uint8)


class Repeats:
    """Runs calls again and again.

    Args:
        device: of the tensors.
        runs: how often each call is made, at least 2.
    """

    def __init__(self, device: str, runs: int) -> None:
        self._device, self._runs = device, runs
        self._on_gpu = device != "cpu"
        self._beside = torch.cuda.Stream() if self._on_gpu else None
        self._square = torch.randn(1024, 1024, device=device)

    def check(self, call: Case) -> str:
        """Return what is wrong with a call's results, or an empty string."""
        first = [bits(part).clone() for part in call()]
        different = [0] * len(first)
        for run in range(1, self._runs):
            self._disturb(run)
            for place, part in enumerate(call()):
                if part.is_floating_point() and not bool(part.float().isfinite().all()):
                    return f"output {place} is not finite in run {run}"
                different[place] += not torch.equal(bits(part), first[place])
        wrong = [f"output {place} in {count}" for place, count in enumerate(different) if count]
        return f"other bits: {', '.join(wrong)} of {self._runs} runs" if wrong else ""

    def _disturb(self, run: int) -> None:
        poison = torch.full(
            (POISONED // 4 if self._on_gpu else 1,), float("nan"), device=self._device
        )
        del poison
        if self._beside is not None and run % 2:
            with torch.cuda.stream(self._beside):
                for _ in range(20):
                    self._square @ self._square


def check_all(device: str, runs: int, small: bool, share: str) -> bool:
    """Print a line for each kernel that is wrong, and return whether all are right.

    Args:
        share: "k/n" for every n-th call, from the k-th on.
    """
    repeats, good, count = Repeats(device, runs), True, 0
    begin = time.monotonic()
    first, step = map(int, share.split("/"))
    for label, make in islice(calls(device, small), first - 1, None, step):
        count += 1
        try:
            wrong = repeats.check(make()) if runs > 1 else _once(make)
        except Exception as error:  # Any: the other kernels are to be seen too.
            wrong = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if wrong:
            good = False
            print(f"- {label}: {wrong}", flush=True)
    seconds = time.monotonic() - begin
    print(
        f"- {count} calls, {runs} times each: {'all equal' if good else 'wrong'} ({seconds:.0f} s)"
    )
    return good


def _once(make: Callable[[], Case]) -> str:
    make()()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--small", action="store_true", help="one small case of each, once")
    parser.add_argument("--share", default="1/1", help="k/n: every n-th call, from the k-th on")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.device != "cpu" and not torch.cuda.is_available():
        print("No GPU found: nothing was checked. Run this script as it is on a machine with one.")
        return 0
    runs = 1 if given.small else given.runs
    return 0 if check_all(given.device, runs, given.small, given.share) else 1


if __name__ == "__main__":
    sys.exit(main())
