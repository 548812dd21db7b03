"""Plant faults of captured steps one at a time in a copy, and run the tests that should see them.

    python benchmarks/review/plant_faults.py [NAME ...] [--check]

Prints for each whether it was caught. `--check` only looks whether every fault still has its place.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import checkout

LIMIT_SECONDS = 900
MARKERS = ("interpreter", "fuzz", "sweep", "processes", "processors", "memory")
STEPS = "vlm_serve/engine/steps/"
_DRAFTS = "tests/engine/steps/test_draft_graphs.py tests/engine/steps/test_captured_drafts.py"
_DECODE = "tests/engine/steps/test_decode_graphs.py"
_TABLES = "tests/engine/steps/test_step_tables.py"
_TWINS = "tests/engine/test_torch_twins.py"
_PREFILL, _VERIFY = (
    "tests/engine/steps/test_prefill_graphs.py",
    "tests/engine/steps/test_verify_graphs.py",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A replacement in one file.

    Attributes:
        path: from the root.
        old: it occurs there once.
        tests: files, with spaces between.
    """

    path: str
    old: str
    new: str
    tests: str

    def planted(self, root: Path) -> str:
        """Return the file's text with the fault. Raises SystemExit if its place is gone."""
        text = (root / self.path).read_text()
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.path} has {text.count(self.old)} times:\n{self.old}")
        return text.replace(self.old, self.new)


_SEND = "        target.copy_(source, non_blocking=True)\n"
_EVENT = (
    "        read = torch.cuda.Event()  # type: ignore[no-untyped-call]\n        read.record()\n"
)
FAULTS = {
    "event_before_copy": Fault(
        STEPS + "step_tables.py", _SEND + _EVENT, _EVENT + _SEND, f"{_TABLES} {_TWINS}"
    ),
    "tower_rows_not_cloned": Fault(
        STEPS + "local_executor.py",
        "return [embedding.clone() for embedding in rows]",
        "return rows",
        "tests/engine/steps/test_tower_graphs.py",
    ),
    "drafts_not_cloned": Fault(
        STEPS + "mtp_runner.py",
        "drafts.append(graphs.best[: len(requested)].clone())",
        "drafts.append(graphs.best[: len(requested)])",
        _DRAFTS,
    ),
    "first_draft_not_cloned": Fault(
        STEPS + "mtp_runner.py",
        "drafts = [graphs.best[: len(requested)].clone()]",
        "drafts = [graphs.best[: len(requested)]]",
        _DRAFTS,
    ),
    "adapter_table_rebound": Fault(
        STEPS + "adapter_table.py",
        "        records = self.records[slot]\n",
        "        self.records = self.records.clone()\n        records = self.records[slot]\n",
        "tests/engine/features/adapters/test_graphs.py",
    ),
    "logits_rebound": Fault(
        STEPS + "step_graphs.py",
        "self._logits[: output.logits.shape[0]].copy_(output.logits)\n",
        "self._logits = output.logits\n",
        f"{_DECODE} {_PREFILL} {_VERIFY}",
    ),
    "best_rebound": Fault(
        STEPS + "draft_graphs.py",
        "self.best[:count].copy_(output.logits.argmax(-1))",
        "self.best = output.logits.argmax(-1)",
        _DRAFTS,
    ),
    "draft_hidden_rebound": Fault(
        STEPS + "draft_graphs.py",
        "self._hidden[:count].copy_(output.hidden)",
        "self._hidden = output.hidden",
        _DRAFTS,
    ),
    "never_replayed": Fault(
        STEPS + "step_tables.py",
        "        return graph.replay",
        "        return lambda: None",
        f"{_TABLES} {_DECODE}",
    ),
    "capture_global": Fault(
        STEPS + "step_tables.py",
        'CAPTURE_ERRORS = "thread_local"',
        'CAPTURE_ERRORS = "global"',
        f"{_TABLES} {_DECODE}",
    ),
    "padding_dst_stale": Fault(
        STEPS + "step_buffers.py",
        "padding = 1, -1, self._limits.scratch_row, -1",
        "padding = 1, -1, 0, -1",
        f"{_DECODE} {_TWINS}",
    ),
    "prefill_pad_dst_zero": Fault(
        STEPS + "step_buffers.py",
        '("dst_rows", rows, scratch)',
        '("dst_rows", rows, 0)',
        _PREFILL,
    ),
    "entries_stale": Fault(
        STEPS + "step_buffers.py",
        '"entries": Table(torch.int32, (size.drafted * size.room,), -1)',
        '"entries": Table(torch.int32, (size.drafted * size.room,))',
        f"{_VERIFY} {_TWINS}",
    ),
    "before_not_copied": Fault(
        STEPS + "draft_graphs.py",
        "        self._before[: len(before)].copy_(before)\n",
        "",
        _DRAFTS,
    ),
    "specialised_rows": Fault(
        "kernels/linear/few_rows_triton.py",
        '@triton.jit(do_not_specialize=["rows"])',
        "@triton.jit",
        "tests/kernels/test_few_rows_triton.py tests/kernels/test_triton_support.py",
    ),
    "ring_send_wrong_read": Fault(
        STEPS + "step_tables.py",
        "self._reads[self._next] = self._device.send(target, source)",
        "self._reads[self._next - 1] = self._device.send(target, source)",
        _TABLES,
    ),
    "sampler_reads_row_above": Fault(
        STEPS + "sampler.py",
        "logits[_index(drawn, logits.device)]\n",
        "logits[: len(drawn)]\n",
        "tests/engine/steps/test_sampling_rows.py",
    ),
    "tile_row_padding": Fault(
        STEPS + "step_buffers.py",
        "zip(_TILES, (size.prompts, 0), strict=True)",
        "zip(_TILES, (0, 0), strict=True)",
        _PREFILL,
    ),
    "scratch_row_given": Fault(
        STEPS + "step_graphs.py",
        "self._num_rows = max(caches.num_rows - 1, 0)",
        "self._num_rows = max(caches.num_rows - 2, 0)",
        _DECODE,
    ),
    "table_memory_smallest_first": Fault(
        STEPS + "step_tables.py",
        "    return [capture(size) for size in reversed(sizes)][::-1]",
        "    return [capture(size) for size in sizes]",
        f"{_DECODE} tests/engine/steps/test_captured_rows.py",
    ),
}


def outcome(fault: Fault, root: Path) -> str:
    """Run the tests with a fault in the copy, and take it out again."""
    path, text = root / fault.path, (root / fault.path).read_text()
    marked = " and ".join(f"not {each}" for each in MARKERS)
    command = ["-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", marked]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    path.write_text(fault.planted(root))
    try:
        done = subprocess.run(
            [sys.executable, *command, *fault.tests.split()],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"longer than {LIMIT_SECONDS} s"
    finally:
        path.write_text(text)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    return (
        f"{ {0: 'MISSED', 1: 'caught'}.get(done.returncode, f'status {done.returncode}') }; {last}"
    )


def copy_of(root: Path, folder: Path) -> Path:
    """Copy the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (root / name).exists():
            shutil.copy(root / name, target, follow_symlinks=False)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FAULTS))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - FAULTS.keys():
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    for fault in FAULTS.values():
        fault.planted(checkout.ROOT)
    if given.check:
        print(f"{len(FAULTS)} faults have their places")
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(checkout.ROOT, Path(folder))
        for name in given.names or FAULTS:
            begin = time.monotonic()
            print(f"{name}: {outcome(FAULTS[name], copy)}", end="", flush=True)
            print(f", {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
