"""The compiled forward against the ops, layer by layer and cache by cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import SPECS as FAMILIES
from make_checkpoint import make_checkpoint
from model_driver import Driver, Sequence_, text_sequence

from vlm_serve.config import EngineConfig
from vlm_serve.engine import step_paths
from vlm_serve.engine.build import build
from vlm_serve.engine.local_executor import LocalExecutor
from vlm_serve.errors import ConfigError
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.kv_quant import dequantise, quantise, to_float8
from vlm_serve.kernels.native_build import BuildError
from vlm_serve.models import load_model
from vlm_serve.models.batch import ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.program import UnsupportedError

SPECS = {
    "dense": CheckpointSpec(vision_depth=0),
    "experts": CheckpointSpec(vision_depth=0, num_experts=6, experts_per_token=3, num_layers=8),
    # Blocks of 64 columns that are not full, several tiles of columns in a head, groups of three.
    "wide": CheckpointSpec(
        vision_depth=0,
        hidden_size=80,
        intermediate_size=208,
        vocab_size=1001,
        gdn_key_heads=1,
        gdn_value_heads=3,
        gdn_key_dim=48,
        gdn_value_dim=80,
        conv_kernel=3,
        attention_heads=6,
        head_dim=80,
        full_attention_interval=2,
    ),
    # Attention alone, without gates; features behind two layers; every second one dense.
    "features": replace(FAMILIES["vl moe, every second layer dense"], deepstack_features=2),
}
TYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16 in float32": (torch.bfloat16, torch.float32),
    "float16 in float32": (torch.float16, torch.float32),
}
"""Types of weights and activations."""
POOLS: dict[str, tuple[torch.dtype | None, torch.dtype]] = {
    "plain": (None, torch.float32),
    "pages of int8": (torch.uint8, torch.float32),
    "pages of float8": (torch.float8_e4m3fn, torch.float32),
    "states in bfloat16": (None, torch.bfloat16),
    "both": (torch.uint8, torch.bfloat16),
}
"""Types of pages (None: those of activations) and of states."""
ROUNDED = [name for name in POOLS if name != "plain"]

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


@pytest.mark.parametrize("kind", ["float32", "bfloat16 in float32"])
def test_pages_hold_what_the_ops_would_write(tmp_path: Path, kind: str) -> None:
    """Bit for bit: keys and values of the first layer, which no page has had a part in."""
    weights, activations = TYPES[kind]
    path = make_checkpoint(tmp_path, replace(SPECS["features"], dtype="bfloat16"))
    model = load_model(path, weights, "cpu", compute_dtype=activations, compiled=True)
    tokens = random.Random(6).choices(range(400), k=100)

    def first_layer(kv: torch.dtype | None) -> list[torch.Tensor]:
        driver, one = Driver(model, kv=kv), text_sequence(tokens)
        model.compile_steps(driver.caches)
        driver.step(prefills=[(one, 0, 100)])
        pools = driver.caches.of_unit("block")
        return [pool[one.blocks[:-1], 0] for pool in pools]

    (plain,) = first_layer(None)
    assert not plain.isnan().any()
    (float8,) = first_layer(torch.float8_e4m3fn)
    assert torch.equal(_bytes(float8), _bytes(to_float8(plain)))
    codes, scales = first_layer(torch.uint8)
    for got, expected in zip(
        (codes, scales[:, ::2], scales[:, 1::2]), quantise(plain), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_company_and_threads_leave_no_trace(checkpoint: Path, threads: int) -> None:
    model = load_model(checkpoint, torch.bfloat16, "cpu", compiled=True)
    before = torch.get_num_threads()

    def logits(lengths: list[int], count: int) -> torch.Tensor:
        torch.set_num_threads(count)
        driver = Driver(model, num_blocks=200, num_rows=40)
        model.compile_steps(driver.caches)
        own = [text_sequence([n, *range(n - 1)]) for n in lengths]
        first = driver.step(prefills=[(one, 0, len(one.tokens)) for one in own]).logits
        for one in own:
            one.tokens.append(9)
        second = driver.step(own).logits
        return torch.cat([first[: lengths[0]], second[:1]])

    try:
        alone = logits([19], 1)
        assert torch.equal(logits([19, 1, 7, 30], threads), alone)
    finally:
        torch.set_num_threads(before)


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


def test_bad_rows_and_blocks(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, SPECS["dense"])
    model = load_model(path, torch.float32, "cpu", compiled=True)
    driver = Driver(model, num_blocks=8, num_rows=4)
    model.compile_steps(driver.caches)
    one = text_sequence([1, 2, 3])
    driver.step(prefills=[(one, 0, 3)])
    one.tokens.append(4)
    one.row = 4
    with pytest.raises(KernelArgumentError, match=r"meta.src_rows"):
        driver.step([one])
    one.row, one.blocks = 0, [8]
    with pytest.raises(KernelArgumentError, match=r"meta.block_tables"):
        driver.step([one])


@pytest.mark.parametrize("token", [-1, SPECS["dense"].vocab_size])
def test_a_token_without_an_embedding(tmp_path: Path, token: int) -> None:
    path = make_checkpoint(tmp_path, SPECS["dense"])
    model = load_model(path, torch.float32, "cpu", compiled=True)
    driver = Driver(model, num_blocks=8, num_rows=4)
    model.compile_steps(driver.caches)
    one = text_sequence([1, 2, 3])
    driver.step(prefills=[(one, 0, 3)])
    one.tokens.append(token)
    with pytest.raises(RuntimeError, match="vlm_step"):
        driver.step([one])
    one.tokens[-1] = 4
    assert driver.step([one]).logits.isfinite().all()


CUT = [(name, kind, "plain") for name in SPECS for kind in TYPES] + [
    (name, kind, pools)
    for name in ("experts", "wide")
    for kind in ("float32", "bfloat16", "float16 in float32")
    for pools in ROUNDED
]


@pytest.mark.parametrize(("name", "kind", "pools"), CUT)
def test_what_decoding_has_written_is_what_a_prefill_writes(
    tmp_path: Path, name: str, kind: str, pools: str
) -> None:
    """Logits, pages and states have the same bits, wherever prompts end and slices are cut."""
    weights, activations = TYPES[kind]
    path = make_checkpoint(tmp_path, replace(SPECS[name], dtype="bfloat16"))
    model = load_model(path, weights, "cpu", compute_dtype=activations, compiled=True)
    tokens = random.Random(2).choices(range(400), k=620)
    kv, state = POOLS[pools]
    driver = Driver(model, num_rows=40, num_blocks=200, kv=kv, state=state)
    model.compile_steps(driver.caches)
    cold, slow = text_sequence(tokens), text_sequence(tokens[:500])
    whole = driver.step(prefills=[(cold, 0, 620)]).logits
    parts = [driver.step(prefills=[(slow, 0, 500)]).logits]
    company = text_sequence([3] * 40)
    driver.step(prefills=[(company, 0, 40)])
    for token in tokens[500:530]:
        slow.tokens.append(token)
        company.tokens.append(9)
        parts.append(driver.step([company, slow]).logits[1:])
    slow.tokens.extend(tokens[530:])
    parts.append(driver.step([], [(slow, 530, 533), (text_sequence([1] * 70), 0, 70)]).logits[:3])
    parts.append(driver.step(prefills=[(slow, 533, 620)]).logits)
    assert torch.equal(torch.cat(parts), whole)
    caches = driver.caches
    for pool in caches.of_unit("row"):
        assert torch.equal(pool[slow.row], pool[cold.row])
    last = len(cold.blocks) - 1
    for pool in caches.of_unit("block"):
        assert torch.equal(_bytes(pool[slow.blocks[:last]]), _bytes(pool[cold.blocks[:last]]))


def _bytes(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.uint8)


@pytest.mark.parametrize(
    ("spec", "dtype", "pools", "reason"),
    [
        (CheckpointSpec(hidden_size=72), torch.float32, {}, "hidden_size is 72"),
        (CheckpointSpec(head_dim=24), torch.float32, {}, "head_dim is 24"),
        (CheckpointSpec(conv_kernel=10), torch.float32, {}, "10 taps"),
        (CheckpointSpec(), torch.float16, {}, "activations in torch.float16"),
        (CheckpointSpec(), torch.float32, {"recurrent": torch.float16}, "states in torch.float16"),
        (CheckpointSpec(), torch.bfloat16, {"kv": torch.float32}, "KV pages in torch.float32"),
        (CheckpointSpec(), torch.bfloat16, {"kv": torch.float16}, "KV pages in torch.float16"),
    ],
)
def test_what_it_does_not_know(
    tmp_path: Path,
    spec: CheckpointSpec,
    dtype: torch.dtype,
    pools: dict[str, torch.dtype],
    reason: str,
) -> None:
    path = make_checkpoint(tmp_path, replace(spec, vision_depth=0))
    model = load_model(path, dtype, "cpu", compiled=True)
    caches = Driver(model).caches
    changed = {name: caches[name].to(kind) for name, kind in pools.items()}
    with pytest.raises(UnsupportedError, match=reason):
        model.compile_steps(replace(caches, tensors={**caches.tensors, **changed}))


def test_other_pools_are_for_the_ops(tmp_path: Path) -> None:
    """What was compiled holds the addresses of its own pools."""
    path = make_checkpoint(tmp_path, SPECS["dense"])
    model = load_model(path, torch.float32, "cpu", compiled=True)
    first, second = Driver(model), Driver(model)
    model.compile_steps(first.caches)
    second.step(prefills=[(text_sequence([1, 2, 3]), 0, 3)])
    assert first.caches["recurrent"].isnan().all()
    assert not second.caches["recurrent"].isnan().all()


def config(**options: bool | str) -> EngineConfig:
    given = {"dtype": "float32", "block_size": 16, "cache_memory": "16MiB"} | options
    return EngineConfig(**given)  # type: ignore[arg-type]


def test_the_engine_compiles_unless_told_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(make_checkpoint(tmp_path, SPECS["dense"]))

    def built(**options: bool | str) -> tuple[bool | None, bool]:
        parts = build(path, config(**options))
        assert isinstance(parts.executor, LocalExecutor)
        return parts.config.compiled_kernels, parts.executor._model._compiled_step is not None

    assert built() == (True, True)
    assert built(compiled_kernels=False) == (False, False)
    assert built(deterministic=True) == (True, True)
    for kv in ("float32", "bfloat16", "float16", "fp8", "int8"):
        assert built(kv_cache_dtype=kv) == (True, True)
    assert built(state_dtype="bfloat16") == (True, True)
    assert not caplog.text
    narrow = {"dtype": "bfloat16", "compute_dtype": "bfloat16"}
    assert built(**narrow, kv_cache_dtype="float16") == (True, False)
    assert "steps are not compiled as a whole: KV pages in torch.float16" in caplog.text


def test_an_engine_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise BuildError("a C++ compiler was not found")

    monkeypatch.setattr(step_paths, "digests", fail)
    path = str(make_checkpoint(tmp_path, SPECS["dense"]))
    assert build(path, config()).config.compiled_kernels is False
    assert "there are no compiled kernels: a C++ compiler was not found" in caplog.text
    with pytest.raises(ConfigError, match="compiled_kernels: a C"):
        build(path, config(compiled_kernels=True))
