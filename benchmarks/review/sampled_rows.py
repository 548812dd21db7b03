"""Compare sampling in the kernels with its rule by torch on many rows, in Triton's interpreter.

    python benchmarks/review/sampled_rows.py [--rows 100000] [--seed 0]

Rows are of all kinds, with random logits, some of them equal. Prints each row whose token differs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

os.environ["TRITON_INTERPRET"] = "1"

import checkout  # noqa: F401
from sampling_cases import Case, small
from triton_case import kernels

from vlm_serve.kernels.sampling import reference
from vlm_serve.kernels.sampling import triton as sampling

SIZES = {"TILE": 128, "BINS": 128, "LISTED": 256, "_PART": 128, "_AT_ONCE": 256}
"""Two tiles of a small vocabulary; few rows have more members of a bin than the list holds."""
VOCABULARY, AT_ONCE = 200, 16


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    done = different = 0
    began = time.monotonic()
    while done < given.rows:
        case = Case(given.seed + done, AT_ONCE, VOCABULARY, (0.0, 0.125, 1.0)[done // AT_ONCE % 3])
        expected = case.sampled(reference.sample_rows)[0]
        with kernels(), small(**SIZES):
            found = case.sampled(sampling.sample_rows)[0]
        for row in (found != expected).any(1).nonzero().flatten().tolist():
            different += 1
            print(f"seed {given.seed + done}, row {row}: {found[row]}, not {expected[row]}")
        done += AT_ONCE
        if done % (20 * AT_ONCE) == 0:
            rate = done / (time.monotonic() - began)
            print(f"{done} rows, {different} differ; {rate:.0f} rows a second", flush=True)
    print(f"{done} rows, {different} differ")


if __name__ == "__main__":
    main()
