"""Logits and greedy tokens equal transformers': shapes of heads, splits, batches, dtypes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import SPECS
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence

from vlm_serve.models import load_model

TOLERANCE = 1e-4

Maker = Callable[[CheckpointSpec], Path]


def text_only(**sizes: int | bool) -> CheckpointSpec:
    return CheckpointSpec(num_layers=4, vision_depth=0, **sizes)  # type: ignore[arg-type]


HEADS = {
    "values_1x": text_only(gdn_key_heads=2, gdn_value_heads=2, kv_heads=1),
    "values_2x": text_only(gdn_key_heads=2, gdn_value_heads=4, kv_heads=2),
    "values_3x": text_only(gdn_key_heads=2, gdn_value_heads=6, kv_heads=4),
    "wide_values": text_only(gdn_key_dim=16, gdn_value_dim=32, conv_kernel=3),
    "attention_first": text_only(full_attention_interval=1),
    "tied": text_only(tied_embeddings=True),
    "moe": text_only(num_experts=8, experts_per_token=2),
    "moe_values_3x": text_only(num_experts=4, experts_per_token=3, gdn_value_heads=6, kv_heads=1),
    **{name: spec for name, spec in SPECS.items() if spec.family != "qwen3_5"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    made: dict[CheckpointSpec, Path] = {}

    def make(spec: CheckpointSpec) -> Path:
        if spec not in made:
            made[spec] = make_checkpoint(tmp_path_factory.mktemp("parity"), spec)
        return made[spec]

    return make


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(400), k=count)


def reference(path: Path, tokens: list[int]) -> torch.Tensor:
    return oracle.logits(path, {"input_ids": torch.tensor([tokens])})


@pytest.mark.parametrize("name", HEADS)
def test_prefill_and_decode(checkpoint: Maker, name: str) -> None:
    path = checkpoint(HEADS[name])
    model = load_model(path, torch.float32, "cpu")
    tokens = random_tokens(150)
    expected = reference(path, tokens)
    for count in (1, 16, 17, 150):
        got = Driver(model).prefill(text_sequence(tokens[:count]))
        torch.testing.assert_close(got, expected[:count], atol=TOLERANCE, rtol=0)
    prompt, driver = text_sequence(tokens[:33]), Driver(model)
    driver.prefill(prompt)
    for position in range(33, 49):
        prompt.tokens.append(tokens[position])
        logits = driver.step(decodes=[prompt]).logits
        torch.testing.assert_close(logits[0], expected[position], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["values_2x", "moe", "vl moe", "next", "qwen3", "qwen3 moe"])
def test_greedy_tokens(checkpoint: Maker, name: str) -> None:
    path = checkpoint(HEADS[name])
    model = load_model(path, torch.float32, "cpu")
    for count in (1, 40):
        tokens = random_tokens(count, seed=count)
        expected = oracle.greedy(path, {"input_ids": torch.tensor([tokens])}, 64)
        assert Driver(model).generate(text_sequence(tokens), 64) == expected


@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill_in_slices(checkpoint: Maker, block_size: int) -> None:
    path = checkpoint(HEADS["values_2x"])
    model = load_model(path, torch.float32, "cpu")
    tokens = random_tokens(200)
    expected = reference(path, tokens)
    draw = random.Random(block_size)
    for _ in range(6):
        cuts = sorted(draw.sample(range(1, 200), draw.randint(1, 8)))
        got = Driver(model, block_size=block_size).prefill(text_sequence(tokens, cuts), cuts)
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["values_3x", "moe", "vl moe", "next", "qwen3 moe"])
def test_decode_and_prefill_in_one_batch(checkpoint: Maker, name: str) -> None:
    path = checkpoint(HEADS[name])
    driver = Driver(load_model(path, torch.float32, "cpu"))
    prompts = [text_sequence(random_tokens(count, seed=count)) for count in (1, 40, 64, 90)]
    expected = [reference(path, one.tokens + random_tokens(1)) for one in prompts]
    first, second, third, fourth = prompts
    driver.step(prefills=[(first, 0, 1), (second, 0, 40)])
    for one in (first, second):
        one.tokens += random_tokens(1)
    got = driver.step([second, first], [(fourth, 0, 33), (third, 0, 64)]).logits
    pieces = [
        expected[1][-1:],
        expected[0][-1:],
        expected[3][:33],
        expected[2][:64],
    ]
    torch.testing.assert_close(got, torch.cat(pieces), atol=TOLERANCE, rtol=0)
    got = driver.step(prefills=[(fourth, 33, 90)], all_logits=False).logits
    torch.testing.assert_close(got, expected[3][89:90], atol=TOLERANCE, rtol=0)


def test_only_the_wanted_rows(checkpoint: Maker) -> None:
    path = checkpoint(HEADS["moe"])
    model = load_model(path, torch.float32, "cpu")
    tokens = random_tokens(50)
    whole = Driver(model).prefill(text_sequence(tokens))
    last = Driver(model).step(prefills=[(text_sequence(tokens), 0, 50)], all_logits=False).logits
    torch.testing.assert_close(last, whole[-1:], atol=1e-5, rtol=0)


def test_float16_and_bfloat16_are_as_good_as_transformers(checkpoint: Maker) -> None:
    path = checkpoint(HEADS["values_2x"])
    tokens = random_tokens(200)
    exact = reference(path, tokens)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad():
            theirs = oracle.model(path, dtype)(torch.tensor([tokens])).logits[0].float()
        ours = Driver(load_model(path, dtype, "cpu")).prefill(text_sequence(tokens))
        assert ours.dtype == torch.float32
        ours_error = (ours - exact).square().mean().sqrt()
        assert ours_error <= 1.2 * (theirs - exact).square().mean().sqrt()


@pytest.mark.parametrize(
    ("name", "sparse"),
    [
        ("moe", [0, 1, 2, 3]),
        ("vl moe, every second layer dense", [3, 5]),
        ("next, three value heads, dense layers", [3, 5, 7]),
        ("qwen3 moe", [0, 1, 2, 3]),
    ],
)
def test_experts_are_captured(checkpoint: Maker, name: str, sparse: list[int]) -> None:
    """Rows are those of the layers that have experts."""
    path = checkpoint(HEADS[name])
    driver = Driver(load_model(path, torch.float32, "cpu"))
    tokens = random_tokens(30)
    routed: list[torch.Tensor] = []
    oracle_model = oracle.model(path)
    decoder = getattr(oracle_model.model, "language_model", oracle_model.model)
    hooks = [
        decoder.layers[index].mlp.gate.register_forward_hook(
            lambda _module, _in, out: routed.append(out[2])
        )
        for index in sparse
    ]
    reference(path, tokens)
    for hook in hooks:
        hook.remove()
    one = text_sequence(tokens)
    captured = driver.step(prefills=[(one, 0, 30)], capture_experts=True).experts
    assert captured is not None and captured.dtype == torch.uint8
    assert captured.shape == (30, len(sparse), 2)
    expected = torch.stack(routed, dim=1)
    assert torch.equal(captured.long().sort(-1).values, expected.sort(-1).values)
    one.tokens += tokens[:1]
    decoded = driver.step(decodes=[one], capture_experts=True).experts
    assert decoded is not None and decoded.shape == (1, len(sparse), 2)
    assert driver.step(decodes=[one]).experts is None


def test_experts_of_a_dense_model_are_none(checkpoint: Maker) -> None:
    driver = Driver(load_model(checkpoint(HEADS["values_1x"]), torch.float32, "cpu"))
    one = text_sequence(random_tokens(5))
    assert driver.step(prefills=[(one, 0, 5)], capture_experts=True).experts is None
