"""The layer that drafts equals one made of transformers' parts, read in any pieces."""

from __future__ import annotations

import random
from pathlib import Path

import oracle
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence
from quantised_oracles import experts_together
from safetensors.torch import load_file

from vlm_serve.engine.requests.plan import SequenceInfo
from vlm_serve.engine.steps.batching import KnownSequence
from vlm_serve.engine.steps.mtp_runner import MtpInput, make_draft_batch
from vlm_serve.models import load_model
from vlm_serve.sampling_params import SamplingParams

SPECS = {
    "dense": CheckpointSpec(mtp=True, tied_embeddings=True),
    "experts": CheckpointSpec(mtp=True, vision_depth=0, num_experts=6),
    "next": CheckpointSpec(mtp=True, vision_depth=0, num_experts=6, family="qwen3_next"),
}
TOKENS = 45


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mtp"), SPECS[request.param])


@pytest.fixture(scope="module")
def text() -> list[int]:
    return random.Random(5).choices(range(400), k=TOKENS + 1)


@torch.no_grad()
def reference(path: Path, text: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The model's hidden states of all tokens, and the layer's logits and hidden states of all
    but the first, which reads nothing."""
    whole = oracle.model(path)
    model = getattr(whole.model, "language_model", whole.model)
    parts = type(model.layers[0])
    config = model.config
    weights = load_file(path / "model.safetensors")
    kinds = list(config.layer_types)
    layer = parts(config, kinds.index("full_attention")).eval()
    own = "mtp.layers.0."
    stored = {n[len(own) :]: w for n, w in weights.items() if n.startswith(own)}
    layer.load_state_dict(experts_together(stored, transposed=False))
    norms = {}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        norms[name] = type(model.norm)(config.hidden_size, config.rms_norm_eps)
        norms[name].load_state_dict({"weight": weights[f"mtp.{name}.weight"]})
    ids = torch.tensor([text])
    hidden = model(input_ids=ids, use_cache=False).last_hidden_state
    pair = (
        norms["pre_fc_norm_embedding"](model.embed_tokens(ids[:, 1:])),
        norms["pre_fc_norm_hidden"](hidden[:, :-1]),
    )
    x = torch.cat(pair, dim=-1) @ weights["mtp.fc.weight"].T
    count = x.shape[1]
    angles = model.rotary_emb(x, torch.arange(count)[None])
    future = torch.full((count, count), float("-inf")).triu(1)[None, None]
    x = layer(x, position_embeddings=angles, attention_mask=future)
    x = norms["norm"](x[0] if isinstance(x, tuple) else x)
    return hidden[0], whole.lm_head(x)[0], x[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_equals_transformers(
    checkpoint: Path, text: list[int], compiled: bool, request: pytest.FixtureRequest
) -> None:
    """Beside another sequence, in pieces of any length; hidden states are the model's own."""
    if compiled:
        request.getfixturevalue("compiler")
    expected_hidden, expected_logits, expected_next = reference(checkpoint, text)
    model = load_model(checkpoint, torch.float32, "cpu", compiled=compiled, drafts=True)
    driver = Driver(model)
    if compiled:
        model.compile_steps(driver.caches)
    one, other = text_sequence(text), text_sequence(list(reversed(text)))
    outputs = [driver.step(prefills=[(each, 0, TOKENS + 1)]) for each in (other, one)]
    for output in outputs:
        assert output.hidden is not None
    close(outputs[1].hidden, expected_hidden)
    known = []
    for number, each in enumerate((one, other)):
        info = SequenceInfo(number, tuple(each.tokens), each.positions, 0, SamplingParams(), seed=0)
        known.append(KnownSequence(info))
        known[-1].table.extend(each.blocks)
    draw, start = random.Random(3), 1
    while start < TOKENS + 1:
        end = min(TOKENS + 1, start + draw.choice((1, 2, 17)))
        pieces = [
            MtpInput(known[1], start, tuple(other.tokens[start:end])),
            MtpInput(known[0], start, tuple(text[start:end]), wanted=1),
        ]
        before = [output.hidden[start - 1 : end - 1] for output in outputs]  # type: ignore[index]
        batch = make_draft_batch(pieces, driver.block_size)
        output = model.draft(batch, torch.cat(before), driver.caches)
        close(output.logits, expected_logits[end - 2 : end - 1])
        close(output.hidden, expected_next[end - 2 : end - 1])
        start = end


def close(ours: torch.Tensor | None, theirs: torch.Tensor) -> None:
    assert ours is not None and ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= 1e-4 * max(1.0, float(theirs.abs().max()))
