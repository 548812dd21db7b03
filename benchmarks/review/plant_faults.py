"""Plant faults of captured steps one at a time in a copy, and run the tests that should see them.

    python benchmarks/review/plant_faults.py [NAME ...] [--check]

Prints for each whether it was caught. A failed test, a crash and a hang are. The status is 1 if a
fault was missed that is not harmless. First the tests run without any. `--check` only looks whether
every fault still has its place and its tests.
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
STEPS, TESTS = "vlm_serve/engine/steps/", "tests/engine/steps/"


@dataclass(frozen=True, slots=True)
class Fault:
    """A replacement in one file.

    Attributes:
        path: from the root.
        old: it occurs there once.
        tests: those that should see it, as pytest takes them.
        harmless: why none has to see it; "" if one has to.
    """

    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    harmless: str = ""

    def planted(self, root: Path) -> str:
        """Return the file's text with the fault. Raises SystemExit if its place is gone."""
        text = (root / self.path).read_text()
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.path} has {text.count(self.old)} times:\n{self.old}")
        return text.replace(self.old, self.new)

    def check(self, root: Path) -> None:
        """Raise SystemExit if its place or one of its tests is gone."""
        self.planted(root)
        for test in self.tests:
            file, _, function = test.partition("::")
            text = (root / file).read_text() if (root / file).exists() else ""
            if f"\ndef {function.partition('[')[0]}" not in text:
                raise SystemExit(f"there is no test {test}")


def _tests(file: str, *names: str) -> tuple[str, ...]:
    """Return some tests of a file, or all of it."""
    return tuple(f"{file}::{name}" for name in names) or (file,)


_CAPTURES = _tests(TESTS + "test_cuda_graphs.py")
_QUEUE = _tests(
    TESTS + "test_step_tables.py",
    "test_a_buffer_is_filled_again_only_when_its_copy_was_made",
    "test_a_ring_serves_tables_of_several_sizes",
)
_DECODE = _tests(
    TESTS + "test_decode_graphs.py",
    "test_a_smaller_step_leaves_padding_behind_it",
    "test_steps_of_all_sizes_share_their_tables[dense]",
    "test_padding_touches_its_scratch_row_alone[dense]",
)
_DRAFTS = _tests(TESTS + "test_draft_graphs.py", "test_drafts_are_those_of_plain_passes[dense]")
_PREFILL = _tests(
    TESTS + "test_prefill_graphs.py",
    "test_tables_behind_a_step_are_padding",
    "test_padding_touches_its_scratch_row_alone[dense]",
)
_LARGEST_FIRST = """    for size in reversed(sizes):
        with naming(name.format(size)):
            captured.append(capture(size))
    return captured[::-1]
"""
_PADDING = """                (carved[part][name], table.padding)
                for part, tables in parts.items()
                for name, table in tables.items()
"""
_STALE = _PADDING + '                if name != "{}"\n'


_SEND = "        target.copy_(source, non_blocking=True)\n"
_EVENT = (
    "        read = torch.cuda.Event()  # type: ignore[no-untyped-call]\n        read.record()\n"
)
FAULTS = {
    "event_before_copy": Fault(STEPS + "step_tables.py", _SEND + _EVENT, _EVENT + _SEND, _QUEUE),
    "tower_rows_not_cloned": Fault(
        STEPS + "local_executor.py",
        "return [embedding.clone() for embedding in rows]",
        "return rows",
        _tests(
            TESTS + "test_tower_graphs.py",
            "test_embeddings_that_fill_a_graph_outlive_the_next_run[plain]",
        ),
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
        _tests(
            "tests/engine/features/adapters/test_graphs.py",
            "test_slots_are_emptied_and_filled_between_replays[dense]",
        ),
    ),
    "logits_rebound": Fault(
        STEPS + "step_graphs.py",
        "self._logits[: output.logits.shape[0]].copy_(output.logits)\n",
        "self._logits = output.logits\n",
        _DECODE,
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
        _CAPTURES,
    ),
    "capture_global": Fault(
        STEPS + "step_tables.py",
        'CAPTURE_ERRORS = "thread_local"',
        'CAPTURE_ERRORS = "global"',
        _CAPTURES,
    ),
    "padding_dst_stale": Fault(
        STEPS + "step_tables.py", _PADDING, _STALE.format("dst_rows"), _DECODE
    ),
    "prefill_pad_dst_zero": Fault(
        STEPS + "step_buffers.py",
        "rows, scratch = size.prompts + 1, limits.scratch_row",
        "rows, scratch = size.prompts + 1, 0",
        _PREFILL,
    ),
    "entries_stale": Fault(
        STEPS + "step_tables.py",
        _PADDING,
        _STALE.format("entries"),
        _tests(TESTS + "test_verify_graphs.py", "test_tables_behind_a_step_are_padding"),
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
        _tests("tests/kernels/test_few_rows_triton.py"),
        harmless="captured steps have few numbers of rows, all compiled at start",
    ),
    "ring_send_wrong_read": Fault(
        STEPS + "step_tables.py",
        "self._reads[self._next] = self.device.send(target, source)",
        "self._reads[self._next - 1] = self.device.send(target, source)",
        _QUEUE,
    ),
    "sampler_reads_row_above": Fault(
        STEPS + "row_sampling.py",
        "Mark(row, kind, top_k,",
        "Mark(0, kind, top_k,",
        _tests(TESTS + "test_sampling_rows.py"),
    ),
    "tile_row_padding": Fault(
        STEPS + "step_buffers.py",
        "zip(_TILES, (size.prompts, 0), strict=True)",
        "zip(_TILES, (0, 0), strict=True)",
        _PREFILL,
        harmless="the same rows are computed again",
    ),
    "scratch_row_given": Fault(
        STEPS + "step_graphs.py",
        "self._num_rows = max(caches.num_rows - 1, 0)",
        "self._num_rows = max(caches.num_rows - 2, 0)",
        _DECODE,
    ),
    "table_memory_smallest_first": Fault(
        STEPS + "step_tables.py",
        _LARGEST_FIRST,
        _LARGEST_FIRST.replace("reversed(sizes)", "sizes").replace("[::-1]", ""),
        _DECODE,
    ),
    "sampled_ids_not_moved": Fault(
        STEPS + "step_graphs.py",
        "        if batch.sampled is not None:\n",
        "        if False:\n",
        _tests(TESTS + "test_one_step_ahead.py", "test_answers_have_the_same_bits[dense]"),
    ),
    "columns_not_moved": Fault(
        STEPS + "step_tables.py",
        "            self._ring.device.move(target, source)\n",
        "            pass\n",
        _DECODE,
    ),
    "step_hidden_rebound": Fault(
        STEPS + "step_graphs.py",
        "self._hidden[: hidden.shape[0]].copy_(hidden)",
        "self._hidden = hidden",
        _tests(
            TESTS + "test_draft_graphs.py",
            "test_captured_steps_report_their_hidden_states[dense-decode]",
        ),
    ),
    "embeddings_rebound": Fault(
        STEPS + "tower_graphs.py",
        "self._out[: len(rows)].copy_(rows)",
        "self._out = rows",
        _tests(
            TESTS + "test_tower_graphs.py",
            "test_embeddings_that_fill_a_graph_outlive_the_next_run[plain]",
        ),
    ),
    "warm_up_before_its_tables": Fault(
        STEPS + "step_tables.py", "        self._stream.wait_stream(current)\n", "", _CAPTURES
    ),
    "steps_beside_a_warm_up": Fault(
        STEPS + "step_tables.py", "        current.wait_stream(self._stream)\n", "", _CAPTURES
    ),
    "capture_without_warm_up": Fault(
        STEPS + "step_tables.py", "_WARM_UP = 2\n", "_WARM_UP = 0\n", _CAPTURES
    ),
    "host_memory_pageable": Fault(
        STEPS + "step_tables.py", "dtype=torch.uint8, pin_memory=True", "dtype=torch.uint8", _QUEUE
    ),
    "copies_block": Fault(
        STEPS + "step_tables.py",
        "target.copy_(source, non_blocking=True)",
        "target.copy_(source)",
        _QUEUE,
    ),
    "capture_on_torchs_stream": Fault(
        STEPS + "step_tables.py",
        "torch.cuda.graph(graph, self._pool, self._stream, CAPTURE_ERRORS)",
        "torch.cuda.graph(graph, self._pool, None, CAPTURE_ERRORS)",
        _CAPTURES,
    ),
    "tiles_of_the_first_gpu": Fault(
        "kernels/triton_support.py",
        "_device_target(-1 if _interprets() else torch.cuda.current_device())",
        "_device_target(-1 if _interprets() else 0)",
        _tests("tests/kernels/test_triton_support.py"),
    ),
}


def with_fault(fault: Fault, root: Path) -> str:
    """Run the tests with a fault in the copy, and take it out again. Return what caught it; "" if
    nothing did."""
    path, text = root / fault.path, (root / fault.path).read_text()
    path.write_text(fault.planted(root))
    try:
        return failure(fault.tests, root)
    finally:
        path.write_text(text)


def failure(tests: Sequence[str], root: Path) -> str:
    """Run tests in the copy. Return the first that fails, or how they end; "" if they pass. Raises
    SystemExit if pytest cannot run them."""
    command = ["-m", "pytest", "-q", "-x", "-n", "0", "--tb=line", "-p", "no:cacheprovider"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            [sys.executable, *command, "-m", "not interpreter", *tests],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"longer than {LIMIT_SECONDS} s"
    if done.returncode in (0, 1):
        failed = [line for line in done.stdout.splitlines() if line[:6] in ("FAILED", "ERROR ")]
        named = failed[0].split("::")[-1].split()[0].rstrip(":") if failed else "a failure"
        return named if done.returncode else ""
    if done.returncode in (2, 3, 4, 5):
        raise SystemExit(f"pytest cannot run {' '.join(tests)}\n{done.stdout[-2000:]}")
    return f"a crash, status {done.returncode}"


def copy_of(root: Path, folder: Path) -> Path:
    """Copy the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (root / name).exists():
            shutil.copy(root / name, target, follow_symlinks=False)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FAULTS))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - FAULTS.keys():
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    for fault in FAULTS.values():
        fault.check(checkout.ROOT)
    if given.check:
        print(f"{len(FAULTS)} faults have their places and tests")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(checkout.ROOT, Path(folder))
        return planted_in(copy, given.names or list(FAULTS))


def planted_in(copy: Path, names: Sequence[str]) -> int:
    """Plant faults in a copy and print whether they are caught. Return the exit status."""
    tests = dict.fromkeys(test for name in names for test in FAULTS[name].tests)
    if found := failure(list(tests), copy):
        raise SystemExit(f"without a fault there is one: {found}")
    missed = 0
    for name in names:
        begin, fault = time.monotonic(), FAULTS[name]
        found = with_fault(fault, copy)
        missed += not found and not fault.harmless
        verdict = (
            f"caught by {found}" if found else ", ".join(("missed", fault.harmless)).rstrip(", ")
        )
        print(f"{name}: {verdict}; {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{len(names)} planted; {missed} missed that are not harmless")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
