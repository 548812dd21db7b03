"""Engines with drafts on a device behind the host: with captured steps and passes they answer, and
hit, as without."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from guesses import Oracle, consult, draft_freely
from make_checkpoint import make_checkpoint
from parity_cases import random_ids
from queued_device import QueuedDevice, with_queue
from step_graphs import SPECS
from sweeps import quick

from vlm_serve.engine.features.drafts.lengths import CostCurve
from vlm_serve.engine.start import build as building
from vlm_serve.engine.steps import step_paths
from vlm_serve.engine.steps.draft_graphs import DraftGraphs
from vlm_serve.engine.steps.step_graphs import StepGraphs
from vlm_serve.engine.steps.step_sizes import StepSize
from vlm_serve.kernels.triton_support import interpreted
from vlm_serve.models.parts import feed_forward
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")

DRAFTS = 3
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "cache_memory": "16MiB",
    "max_num_seqs": 2,
    "max_model_len": 128,
    "prefix_cache_decode_state_interval": 16,
    "compiled_kernels": False,
    "speculative_tokens": DRAFTS,
}
PARAMS = {
    "greedy": SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=7, temperature=0.9, seed=3, ignore_eos=True),
}
Answers = list[tuple[list[int], int]]
"""Tokens, and how many of the prompt were cached."""


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter computes every size once. A whole engine is slower than its parts."""
    sizes = StepSize(0, 1, DRAFTS + 1), StepSize(1, 2, DRAFTS + 1)
    passes = StepSize(0, 2, 1), StepSize(0, 2, DRAFTS + 2)
    monkeypatch.setattr(step_paths, "verify_sizes", lambda *limits: sizes)
    monkeypatch.setattr(step_paths, "pass_sizes", lambda *limits: passes)
    monkeypatch.setattr(building, "measure_costs", lambda *engine: (CostCurve(), None))
    # The Triton kernels do not read the experts' packed weights of the CPU path.
    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: True)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the steps and passes that graphs compute."""
    found: Counter[str] = Counter()
    for kind, name in ((StepGraphs, "run"), (DraftGraphs, "run"), (DraftGraphs, "run_later")):
        inner = getattr(kind, name)

        def counting(*args: Any, inner: Any = inner, kind: type = kind, name: str = name) -> Any:
            output = inner(*args)
            if output is not None and (kind is DraftGraphs or args[1].verify is not None):
                found[f"{kind.__name__}.{name}"] += 1
            return output

        monkeypatch.setattr(kind, name, counting)
    return found


def answers(checkpoint: Path, source: str, params: SamplingParams, told: Answers) -> Answers:
    """Ask two prompts together, then again; with `suffix`, of drafts that mostly hold."""
    prompts = [random_ids(length, length) for length in (5, 20)]
    with Pipeline(checkpoint, EngineConfig(**COMMON, speculative=source)) as pipe:
        if source != "off":
            draft_freely(pipe.engine)
        if source == "suffix":
            oracle = Oracle(1, mistakes=0.2, vocabulary=400)
            for prompt, (tokens, _) in zip(prompts, told, strict=False):
                oracle.tell(prompt, [tokens])
            consult(pipe.engine, oracle)
        rounds = [pipe.generate_many(prompts, params) for _ in range(2)]
        pipe.engine.check()
        return [(one.token_ids, one.usage.cached_tokens) for each in rounds for one in each]


@pytest.mark.parametrize(
    ("name", "source", "kind"),
    quick(
        [
            (name, source, kind)
            for name in ("dense", "moe", "attention alone")
            for source in ("suffix", "mtp", "mtp,suffix")
            for kind in PARAMS
        ],
        [("dense", "mtp", "greedy"), ("dense", "suffix", "sampled")],
        pytest.mark.interpreter,
        several=True,
    ),
)
def test_the_engine_answers_the_same(
    name: str,
    source: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counts: Counter[str],
) -> None:
    checkpoint = make_checkpoint(tmp_path, replace(SPECS[name], mtp=True))
    params = PARAMS[kind]
    plain = answers(checkpoint, "off", params, [])
    expected = answers(checkpoint, source, params, plain)
    assert [tokens for tokens, _ in expected] == [tokens for tokens, _ in plain]
    assert not counts
    with_queue(monkeypatch, QueuedDevice())
    replay, results = StepGraphs._replay, set[tuple[int, int]]()

    def watched(graphs: StepGraphs, *step: Any) -> Any:
        output = replay(graphs, *step)
        results.add((id(graphs), output.logits.data_ptr()))
        return output

    monkeypatch.setattr(StepGraphs, "_replay", watched)
    assert answers(checkpoint, source, params, plain) == expected
    assert counts["StepGraphs.run"] > 2
    # All kinds of steps write theirs to one place.
    assert len({kind for kind, _ in results}) > 1 and len({place for _, place in results}) == 1
    if "mtp" in source:
        assert counts["DraftGraphs.run"] > 2 and counts["DraftGraphs.run_later"] > 2
