"""Print how far each kernel's results lie from torch's on the GPU at hand, for every family.

    python benchmarks/gpu_kernel_check.py [--only WORD ...] [--share 1/4] [--rehearse]

The comparison that a server makes at start (`--kernel-check`), over the cases of gpu_agreement.py
in float32 and in bfloat16, with adapters and drafts. Prints a line for each kernel and type: the
largest difference of all cases, relative to the largest value, its limit and the case. Exits with 1
if one is beyond it. `--rehearse` takes the interpreter on a CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext

REHEARSED = "--rehearse" in sys.argv
os.environ["TRITON_INTERPRET"] = "1" if REHEARSED else "0"

import common  # noqa: F401, E402  # First: it adds examples/ and tests/ to the path.
import torch  # noqa: E402
from gpu_agreement import Case, cases  # noqa: E402
from make_checkpoint import make_checkpoint  # noqa: E402
from triton_case import kernels  # noqa: E402

from vlm_serve import EngineConfig  # noqa: E402
from vlm_serve.engine.numerics.arithmetic import Backend, decide  # noqa: E402
from vlm_serve.engine.start.kernel_check import compare_kernels  # noqa: E402
from vlm_serve.kernels.triton_check import Faults  # noqa: E402
from vlm_serve.models import load_model, read_spec  # noqa: E402

DEVICE = "cpu" if REHEARSED else "cuda"


def compare(case: Case, dtype: str) -> Faults:
    """Load a case's model and compare the kernels of its steps."""
    options = {**case.options, **case.only_here, "speculative": "suffix"}
    options |= {"reserve_loras": True, "lora_experts": "all"}
    config = EngineConfig(block_size=16, max_num_seqs=4, dtype=dtype, **options)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(folder, case.spec)
        backend = Backend(torch.device(DEVICE))
        arithmetic = decide(config, read_spec(checkpoint).dtype, backend, None)
        types = arithmetic.types
        model = load_model(
            checkpoint, types.weights, DEVICE, compute_dtype=types.compute, bits=arithmetic.bits
        )
        with kernels() if REHEARSED else nullcontext():
            return compare_kernels(model, types, config)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="cases with one of these words")
    parser.add_argument("--share", default="1/1", metavar="K/N")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    if not REHEARSED and not torch.cuda.is_available():
        print("No GPU found: nothing was checked. Run this script as it is on a machine with one.")
        return 0
    first, every = map(int, given.share.split("/"))
    worst: dict[tuple[str, torch.dtype], tuple[float, float, str]] = {}
    failed, begin = 0, time.perf_counter()
    for case in list(cases())[first - 1 :: every]:
        if not any(word in case.name for word in given.only):
            continue
        for dtype in ("float32", "bfloat16"):
            label = f"{case.name} in {dtype}"
            try:
                found = compare(case, dtype)
            except Exception:
                failed += 1
                print(f"- {label}: failed\n{traceback.format_exc()}", flush=True)
                continue
            failed += len(found.failures)
            for sentence in sorted(set(found.failures)):
                print(f"- {label}: {sentence}", flush=True)
            for key, (apart, limit) in found.apart.items():
                worst[key] = max(worst.get(key, (0.0, 0.0, "")), (apart, limit, label))
    for (name, kind), (apart, limit, label) in sorted(worst.items(), key=str):
        print(f"| {name} | {str(kind)[6:]} | {apart:.1e} | {limit:.0e} | {label} |")
    print(f"{failed} beyond their limit, {time.perf_counter() - begin:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
