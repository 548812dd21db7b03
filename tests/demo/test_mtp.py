"""The layer that the recipe trains is the one that the engine drafts with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from demo_chat import ChatFormat
from demo_data import IGNORE, Batch, BatchMaker, BatchSizes
from demo_drafts import print_drafts
from demo_export import export
from demo_mtp import Drafter, reading
from demo_mtp import drafts as read_out
from finish import load
from guesses import draft_freely
from mtp import HELD, accepted, loss, train
from parity_cases import random_ids
from safetensors.torch import load_file
from tokenizers import Tokenizer

import vlm_serve
from vlm_serve import EngineConfig, Pipeline, SamplingParams
from vlm_serve.engine.features.drafts.drafting import Drafting
from vlm_serve.engine.requests.sequence import Sequence

DENSE = Path(vlm_serve.__file__).parent / "demo" / "dense"


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(Tokenizer.from_file(str(DENSE / "tokenizer.json")))


@pytest.fixture(scope="module")
def checkpoint(chat: ChatFormat, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped weights with a layer that nobody has trained."""
    folder = tmp_path_factory.mktemp("drafting")
    torch.manual_seed(2)
    model = load(DENSE, chat).demo
    export(model, chat.tokenizer, folder, Drafter(model.shape))
    return folder


@torch.no_grad()
def test_drafts_of_the_engine_are_those_of_the_recipe(chat: ChatFormat, checkpoint: Path) -> None:
    prompt, made = random_ids(60, 4), dict[int, int]()
    config = EngineConfig(speculative="mtp", speculative_tokens=2, dtype="float32")
    with Pipeline(checkpoint, config) as pipe:
        draft_freely(pipe.engine)
        drafting = pipe.engine._features.get(Drafting)
        assert drafting is not None

        def noting(sequence: Sequence, drafts: tuple[int, ...]) -> None:
            made[sequence.num_tokens] = drafts[0]

        drafting.take = noting  # type: ignore[method-assign]
        answer = pipe.generate(prompt, SamplingParams(max_tokens=40, temperature=0.0))
    model, weights = load(checkpoint, chat).demo, Drafter(load(DENSE, chat).demo.shape)
    stored = load_file(checkpoint / "model.safetensors")
    own = {name[4:]: each.float() for name, each in stored.items() if name.startswith("mtp.")}
    weights.load_state_dict(own)
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
    batch = Batch("text", ids, torch.full_like(ids, IGNORE), ids, positions)
    (read,) = read_out(weights, reading(model, batch), 1)
    expected = model.logits(read)[0].argmax(-1).tolist()
    same = [expected[count - 2] == token for count, token in made.items()]
    assert len(same) > 10 and sum(same) >= len(same) - 1


def test_drafts_are_learned_from_what_was_read_once(
    chat: ChatFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    model = load(DENSE, chat).demo.requires_grad_(False)
    drafter = Drafter(model.shape)
    maker = BatchMaker(chat, 1, BatchSizes(text=4))
    read = [reading(model, maker.make(step, "text", turns=1)) for step in range(HELD + 2)]
    before = loss(model, drafter, read[0], 2).item()
    train(model, drafter, read, steps=16)
    assert loss(model, drafter, read[0], 2).item() < 0.8 * before
    assert accepted(model, drafter, read[:1])[0] > 0
    assert "accepted by position:" in capsys.readouterr().out


@pytest.mark.processes
def test_what_drafts_are_worth_is_printed(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_drafts(checkpoint, 4, 0)
    printed = capsys.readouterr().out
    for kind in ("suffix", "mtp", "mtp,suffix"):
        assert f"drafts by {kind}:" in printed
    assert printed.count("0 answers differ") == 3
