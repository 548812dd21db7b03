"""Check of the Triton kernels at start, by steps of the model that they will serve."""

from __future__ import annotations

import logging
import random
import time
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from vlm_serve.engine.features.adapters.options import changed_experts, serves_adapters
from vlm_serve.engine.numerics.arithmetic import Arithmetic, Types, with_checked_kernels
from vlm_serve.engine.steps.tower_graphs import patch_sizes
from vlm_serve.errors import EngineError
from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.linear.low_rank_factors import RANKS
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.kernels.segment_attention import segment_tiles
from vlm_serve.kernels.triton_faults import faults_at, triton_version
from vlm_serve.models import Model
from vlm_serve.models.adapters import uniform
from vlm_serve.models.batch import ForwardBatch
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.options.config import EngineConfig

if TYPE_CHECKING:
    from vlm_serve.kernels.triton_check import Faults

_log = logging.getLogger(__name__)

LENGTHS = (150, 37)
"""Prompt tokens of the sequences that are checked."""
DRAFTED = 3


def check_at_start(model: Model, arithmetic: Arithmetic, config: EngineConfig) -> Arithmetic:
    """Check the kernels on one GPU. Return the arithmetic with the digest of their bits.

    Raises:
        EngineError: a kernel is wrong.
    """
    if model.device.type != "cuda":
        return arithmetic
    if config.kernel_check and config.tensor_parallel_size == 1:
        return with_checked_kernels(arithmetic, check_kernels(model, arithmetic.types, config))
    for sentence in known_faults(model.device):
        _log.warning("the kernels are not checked at this start; known: %s", sentence)
    return arithmetic


def check_kernels(model: Model, types: Types, config: EngineConfig) -> str:
    """Run a prefill and a decode step, both with adapters if there are any; with drafts a
    verification, with a tower two pictures. Check each kernel's results.

    Returns:
        A digest of the bits that the kernels of prefill and decoding compute, for the numerics.

    Raises:
        EngineError: a kernel fails, computes something else than torch, or not the same twice.
    """
    begin = time.perf_counter()
    for sentence in known_faults(model.device):
        _log.info("%s", sentence)
    _log.info(
        "comparing kernels with the host; those that are not kept are compiled: minutes, once"
    )
    faults, digest = compare_kernels(model, types, config)
    if faults.failures:
        raise EngineError(
            f"kernels compute wrong results on {model.device} with Triton {triton_version()}: "
            f"{'; '.join(sorted(set(faults.failures)))}; another version of Triton may compute "
            "right ones, and --no-kernel-check serves anyway"
            + "".join(f". Known: {sentence}" for sentence in known_faults(model.device))
        )
    if faults.unchecked:
        _log.warning(
            "not compared with torch, since the host took %.0f s for the others: %s",
            faults.spent,
            ", ".join(sorted(faults.unchecked)),
        )
    seconds = time.perf_counter() - begin
    _log.info(
        "checked %d kernels in %.1f s, of which the host took %.1f s: their bits are %s",
        len(faults.checked),
        seconds,
        faults.spent,
        digest,
    )
    return digest


def compare_kernels(model: Model, types: Types, config: EngineConfig) -> tuple[Faults, str]:
    """Run the steps. Return what each kernel's results were beside torch's, and their digest.

    Adapters, drafts and the tower's attention come last, and are not in the digest: whoever has
    them shares entries with whoever does not.
    """
    from vlm_serve.kernels.triton_check import checking

    digest = ""
    with torch.inference_mode(), launching_on(model.device), checking() as faults:
        try:
            steps = CheckedSteps(model, types, config)
            steps.serve()
            digest = faults.digest
            if serves_adapters(config):
                steps.changes = _checked_adapters(model, config)
                steps.serve()
                steps.changes = ()
            if config.speculative != "off":
                steps.verify()
            if patch_sizes(model.spec, config):
                steps.see()
        except RuntimeError:
            if not faults.failures:
                raise
    model.unbind()
    return faults, digest


def known_faults(device: torch.device) -> list[str]:
    """Return a sentence for each known fault of Triton on a GPU: what is done about it, and why."""
    if device.type != "cuda" or torch.version.hip is not None:
        return []
    major, minor = torch.cuda.get_device_capability(device)
    triton = triton_version()
    faults = faults_at(10 * major + minor, triton)
    return [fault.sentence(10 * major + minor, triton) for fault in faults]


def _checked_adapters(model: Model, config: EngineConfig) -> tuple[AdapterChanges, ...]:
    """Return two adapters, which change all modules. Their ranks fill the tiles of u: what no
    kernel reads has no value that could be compared."""
    draw, factors = torch.Generator().manual_seed(0), dict[tuple[int, int], torch.Tensor]()

    def factor(rows: int, columns: int) -> torch.Tensor:
        size = rows, columns
        if size not in factors:
            factors[size] = torch.randn(size, generator=draw).to(torch.bfloat16) / columns**0.5
        return factors[size]

    experts = changed_experts(config)
    return tuple(uniform(model.modules, RANKS, factor, experts) for _ in range(2))


class CheckedSteps:
    """Steps of a few sequences over pools of their own, of the sizes that serving has.

    Args:
        model: the model.
        types: of pools.
        config: options, with a block size.

    Attributes:
        changes: adapters, which rows have in turn; none: no row has one.
    """

    def __init__(self, model: Model, types: Types, config: EngineConfig) -> None:
        self.changes: tuple[AdapterChanges, ...] = ()
        assert config.block_size is not None
        self._model, self._config, self._size = model, config, config.block_size
        # One block more for each: decoded and drafted tokens come behind the prompt.
        blocks = [-(-(length + DRAFTED + 1) // self._size) for length in LENGTHS]
        ends = [0, *accumulate(blocks)]
        self._tables = tuple(
            tuple(range(begin, end)) for begin, end in zip(ends, ends[1:], strict=False)
        )
        layout = model.spec.cache_layout(model.ranks.size, mtp=model.drafts)
        self._has_state = layout.has_state
        drafts = DRAFTED * len(LENGTHS) if config.speculative != "off" and self._has_state else 0
        self._caches: CacheTensors = layout.allocate(
            ends[-1],
            2 * len(LENGTHS) if self._has_state else 0,
            self._size,
            types.pools,
            model.device,
            num_updates=drafts,
        )
        for pool in (*self._caches.of_unit("block"), *self._caches.of_unit("row")):
            pool.zero_()

        draw = random.Random(0)
        most = model.spec.vocab_size
        self._ids = [
            [draw.randrange(most) for _ in range(length + DRAFTED + 1)] for length in LENGTHS
        ]

    def serve(self) -> None:
        """Run a prefill and a decode step."""
        pairs = list(zip(self._ids, LENGTHS, strict=True))
        self._prefill([tokens[:length] for tokens, length in pairs])
        self._decode([tokens[length] for tokens, length in pairs])

    def verify(self) -> None:
        """Verify drafts behind the decoded tokens."""
        pairs = zip(self._ids, LENGTHS, strict=True)
        self._verify([tokens[length + 1 :] for tokens, length in pairs])

    def see(self) -> None:
        """Run the tower over two pictures as its graphs do."""
        vision = self._model.spec.vision
        assert vision is not None
        side = vision.merge_size
        grids = [(1, 4 * side, 6 * side), (1, 2 * side, side)]
        counts = [height * width for _, height, width in grids]
        tower = self._model.fixed_tower(sum(counts))
        assert tower is not None
        draw = torch.Generator().manual_seed(0)
        tower.fill(torch.randn(sum(counts), vision.patch_dim, generator=draw), grids)
        tiles = torch.tensor(segment_tiles(counts), dtype=torch.int32)
        tower.run(sum(counts), tiles.to(self._model.device))

    def _prefill(self, ids: list[list[int]]) -> None:
        chunk, ends = self._config.chunk_size, [0, *accumulate(map(len, ids))]
        rows = self._rows()
        kept = ((0, 0, 2),) if self._has_state else ()
        meta = PrefillMeta(
            cu_seqlens=tuple(ends),
            starts=(0,) * len(ids),
            block_tables=self._tables,
            src_rows=(-1,) * len(ids),
            dst_rows=rows,
            chunk_ends=tuple(
                (*range(begin + chunk, end, chunk), end)
                for begin, end in zip(ends, ends[1:], strict=False)
            ),
            snapshots=kept,
        )
        self._forward(ids, (0,) * len(ids), prefill=meta)

    def _decode(self, tokens: list[int]) -> None:
        rows = self._rows()
        meta = DecodeMeta(
            self._tables,
            tuple(length + 1 for length in LENGTHS),
            rows,
            rows,
            (2, -1) if self._has_state else (-1, -1),
        )
        self._forward([[token] for token in tokens], LENGTHS, decode=meta)

    def _verify(self, ids: list[list[int]]) -> None:
        starts = tuple(length + 1 for length in LENGTHS)
        meta = VerifyMeta(
            cu_seqlens=(0, *accumulate(map(len, ids))),
            starts=starts,
            block_tables=self._tables,
            rows=self._rows(),
            updates=tuple(DRAFTED * index if self._has_state else -1 for index in range(len(ids))),
            folded=(0,) * len(ids),
        )
        self._forward(ids, starts, verify=meta)

    def _rows(self) -> tuple[int, ...]:
        return tuple(range(len(LENGTHS))) if self._has_state else (-1,) * len(LENGTHS)

    def _forward(
        self,
        ids: list[list[int]],
        starts: tuple[int, ...],
        *,
        prefill: PrefillMeta | None = None,
        decode: DecodeMeta | None = None,
        verify: VerifyMeta | None = None,
    ) -> None:
        places = [
            list(range(start, start + len(row))) for row, start in zip(ids, starts, strict=True)
        ]
        slots = [
            table[at // self._size] * self._size + at % self._size
            for run, table in zip(places, self._tables, strict=True)
            for at in run
        ]
        positions = torch.tensor([at for run in places for at in run])
        batch = ForwardBatch(
            token_ids=torch.tensor([token for row in ids for token in row]),
            positions=positions.expand(3, -1),
            slots=torch.tensor(slots),
            decode=decode,
            prefill=prefill,
            logit_rows=torch.arange(len(slots)),
            deterministic=self._config.deterministic,
            verify=verify,
            changes=self._row_changes(len(slots)),
        )
        self._model.forward(batch.to(self._model.device), self._caches)

    def _row_changes(self, rows: int) -> RowChanges | None:
        if not self.changes:
            return None
        return RowChanges(self.changes, [row % len(self.changes) for row in range(rows)])
