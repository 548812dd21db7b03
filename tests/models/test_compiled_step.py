"""The compiled forward against the ops, layer by layer and cache by cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_cases import POOLS, ROUNDED, SPECS, TYPES
from make_checkpoint import make_checkpoint
from model_driver import Driver, Sequence_, text_sequence

from vlm_serve.kernels.kv_quant import dequantise
from vlm_serve.models import load_model
from vlm_serve.models.batch import ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(params=TYPES)
def types(request: pytest.FixtureRequest) -> tuple[torch.dtype, torch.dtype]:
    return TYPES[request.param]


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = replace(SPECS[request.param], dtype="bfloat16")
    return make_checkpoint(tmp_path_factory.mktemp("small"), spec)


class Twins:
    """Drivers over one checkpoint that take the same steps: by ops of torch, compiled, and by ops
    of torch in float32 whatever the types of the others."""

    def __init__(
        self,
        checkpoint: Path,
        types: tuple[torch.dtype, torch.dtype],
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        pools: str = "plain",
    ) -> None:
        weights, activations = types
        self.models = [
            load_model(checkpoint, activations, "cpu"),
            load_model(checkpoint, weights, "cpu", compute_dtype=activations, compiled=True),
            load_model(checkpoint, torch.float32, "cpu"),
        ]
        self.drivers = [
            Driver(
                model,
                num_rows=40,
                num_blocks=num_blocks,
                block_size=block_size,
                kv=POOLS[own][0],
                state=POOLS[own][1],
            )
            for model, own in zip(self.models, (pools, pools, "plain"), strict=True)
        ]
        self.models[1].compile_steps(self.drivers[1].caches)
        # float16 rounds the weights themselves, which the others have in bfloat16.
        # What pools round, they may round either way.
        self.exact = activations == torch.float32 and pools == "plain"
        # Where two experts are nearly as good, bfloat16 may choose either.
        self.slack = 1.5 if self.models[0].spec.routing is None else 3.0
        # The ops round a prompt's states after every chunk, compiled code after every token.
        self.floor = 1e-3 if POOLS[pools][1] == torch.float32 else 1e-2

    def sequences(self, tokens: list[int]) -> list[Sequence_]:
        return [text_sequence(tokens) for _ in self.drivers]

    def step(self, run: Callable[[Driver, int], ForwardOutput]) -> list[ForwardOutput]:
        """Runs a step on all; their logits and all of their caches must agree."""
        outputs = [run(driver, side) for side, driver in enumerate(self.drivers)]
        self.close(*(output.logits for output in outputs))
        best, logits = outputs[1].best, outputs[1].logits
        assert best is not None and list(best) == logits.argmax(-1).tolist()
        for name in {"kv", "conv", "recurrent"} & self.drivers[0].caches.tensors.keys():
            ops, compiled, truth = (_values(driver.caches, name) for driver in self.drivers)
            # What no step has written is NaN in all.
            assert torch.equal(ops.isnan(), compiled.isnan()), name
            self.close(ops.nan_to_num(), compiled.nan_to_num(), truth.nan_to_num())
        return outputs

    def close(self, ops: torch.Tensor, compiled: torch.Tensor, truth: torch.Tensor) -> None:
        """In float32 to a few bits; in bfloat16 about as close to the truth as the ops come."""
        if self.exact:
            torch.testing.assert_close(compiled, ops, rtol=1e-3, atol=5e-5 * float(ops.abs().max()))
            return
        size = float(truth.norm()) + 1e-9
        theirs, ours = ((one.float() - truth).norm() / size for one in (ops, compiled))
        assert ours <= self.slack * theirs + self.floor


def _values(caches: CacheTensors, name: str) -> torch.Tensor:
    """What a pool's numbers stand for; NaN where nothing has been written."""
    pool = caches[name]
    if pool.dtype != torch.uint8:
        return pool.float() if pool.itemsize < 2 else pool
    # Scales and zero points of keys, then those of values.
    scales = caches["kv_scales"]
    return dequantise(pool, scales[:, :, ::2], scales[:, :, 1::2], torch.float32)


@pytest.mark.parametrize("pools", ROUNDED)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_equals_the_ops_over_other_pools(tmp_path: Path, pools: str, kind: str) -> None:
    """Prefill, snapshot, decode, and prefill again behind it."""
    path = make_checkpoint(tmp_path, replace(SPECS["wide"], dtype="bfloat16"))
    twins = Twins(path, TYPES[kind], num_blocks=200, pools=pools)
    tokens = random.Random(5).choices(range(400), k=120)
    pair = twins.sequences(tokens[:90])
    rows = [driver.take_row() for driver in twins.drivers]
    twins.step(
        lambda driver, side: driver.step(
            prefills=[(pair[side], 0, 90)], snapshots=[(pair[side], 48, rows[side])]
        )
    )
    for token in tokens[90:95]:
        for one in pair:
            one.tokens.append(token)
        twins.step(lambda driver, side: driver.step([pair[side]]))
    for one in pair:
        one.tokens.extend(tokens[95:])
    twins.step(lambda driver, side: driver.step(prefills=[(pair[side], 95, 120)]))


def test_equals_the_ops(checkpoint: Path, types: tuple[torch.dtype, torch.dtype]) -> None:
    """Decode steps, short prefills and both together, with snapshots in between."""
    twins = Twins(checkpoint, types, num_blocks=200)
    draw = random.Random(0)
    pairs = [twins.sequences(draw.choices(range(400), k=n)) for n in (90, 5, 33, 1)]
    slices = [(0, 70, 90), (1, 0, 5), (2, 0, 16), (3, 0, 1)]
    twins.step(lambda driver, side: driver.step(prefills=[(pairs[0][side], 0, 70)]))
    rows = [[driver.take_row() for _ in range(3)] for driver in twins.drivers]

    def mixed(driver: Driver, side: int) -> ForwardOutput:
        places = ((0, 80), (0, 90), (2, 16))
        return driver.step(
            prefills=[(pairs[i][side], begin, end) for i, begin, end in slices],
            snapshots=[
                (pairs[i][side], at, row) for (i, at), row in zip(places, rows[side], strict=True)
            ],
        )

    twins.step(mixed)
    for turn in range(3):
        for pair in pairs:
            for one in pair:
                if pair is not pairs[2]:
                    one.tokens.append(7 + turn)

        def decode(driver: Driver, side: int, turn: int = turn) -> ForwardOutput:
            own = [pair[side] for pair in pairs]
            rest = [(own[2], 16, 33)] if turn == 0 else []
            if turn:
                own[2].tokens.append(3 + turn)
            decodes = own if turn else [own[0], own[1], own[3]]
            return driver.step(decodes, rest, all_logits=turn != 1)

        twins.step(decode)


def test_features_of_media(tmp_path: Path, types: tuple[torch.dtype, torch.dtype]) -> None:
    """Two pictures in one sequence and one in another, cut anywhere, beside a decode step."""
    spec = replace(SPECS["features"], dtype="bfloat16")
    twins = Twins(make_checkpoint(tmp_path, spec), types)
    draw = torch.Generator().manual_seed(0)
    media = [torch.randn(n, 3 * spec.hidden_size, generator=draw) for n in (20, 7, 30)]
    tokens = random.Random(3).choices(range(400), k=60)
    first, second, text = (twins.sequences(part) for part in (tokens, tokens[:40], [1, 2, 3]))
    for side, driver in enumerate(twins.drivers):
        own = [one.to(driver.model.dtype) for one in media]
        first[side].media = [(5, own[0]), (30, own[1])]
        second[side].media = [(8, own[2])]
    twins.step(lambda driver, side: driver.step(prefills=[(text[side], 0, 3)]))
    for one in text:
        one.tokens.append(4)

    def together(driver: Driver, side: int) -> ForwardOutput:
        return driver.step([text[side]], [(first[side], 0, 17), (second[side], 0, 38)])

    twins.step(together)
    twins.step(lambda driver, side: driver.step(prefills=[(first[side], 17, 33)]))
    last = twins.step(
        lambda driver, side: driver.step(prefills=[(first[side], 33, 60)], all_logits=False)
    )
    # They do matter.
    for side, driver in enumerate(twins.drivers):
        bare = text_sequence(tokens)
        bare.media = [(at, rows.clone()) for at, rows in first[side].media]
        for _, rows in bare.media:
            rows[:, spec.hidden_size :] = 0
        other = driver.step(prefills=[(bare, 0, 60)], all_logits=False).logits
        assert (other - last[side].logits).abs().max() > 0.1


def test_long_contexts(checkpoint: Path, types: tuple[torch.dtype, torch.dtype]) -> None:
    """Attention over several parts of the keys, the last one not full."""
    twins = Twins(checkpoint, types, num_blocks=200, block_size=32)
    pair = twins.sequences(random.Random(1).choices(range(400), k=700))
    twins.step(lambda driver, side: driver.step(prefills=[(pair[side], 0, 650)], all_logits=False))
    twins.step(lambda driver, side: driver.step(prefills=[(pair[side], 650, 700)]))
    for one in pair:
        one.tokens.append(11)
    twins.step(lambda driver, side: driver.step([pair[side]]))


def test_expert_ids(tmp_path: Path) -> None:
    twins = Twins(make_checkpoint(tmp_path, SPECS["experts"]), TYPES["float32"])
    pairs = [twins.sequences(list(range(n))) for n in (20, 9)]

    def run(driver: Driver, side: int) -> ForwardOutput:
        own = [pair[side] for pair in pairs]
        if own[0].started:
            return driver.step(own, capture_experts=True)
        slices = [(one, 0, len(one.tokens)) for one in own]
        return driver.step(prefills=slices, all_logits=False, capture_experts=True)

    for _ in range(2):
        expected, got, _ = twins.step(run)
        assert got.experts is not None and expected.experts is not None
        assert torch.equal(got.experts, expected.experts) and got.experts.dtype == torch.uint8
        for pair in pairs:
            for one in pair:
                one.tokens.append(5)
