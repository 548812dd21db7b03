"""Teach the demo model by a reward on its text, with a running engine as the sampler.

    python examples/rollouts/train.py [--steps 12] [--rate 0.001]

The demo model completes sentences about drawn shapes. An answer that names something yellow earns
1, and any other one 0. Each step samples a group of answers to each beginning, takes their token
ids and log-probabilities from the engine, and makes one step of policy gradient with transformers
and torch: an answer's reward counts against its group's mean. Then it gives the changed weights to
the engine, which goes on under them. The mean reward goes up from 0.05 to 0.9.

The exit status is 1 if the mean reward does not rise, or if the engine's log-probability of any
sampled token is further than 1e-4 from what transformers computes in float32 with the same weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import oracle  # transformers, also beside a torchvision without its compiled ops

from vlm_serve import Choice, EngineConfig, Output, Pipeline, SamplingParams
from vlm_serve.engine.start.build import find_checkpoint

BEGINNINGS = (
    "A red circle",
    "A green square",
    "A blue star",
    "The star is",
    "The",
    "A black heart",
)
SAMPLING = SamplingParams(n=12, temperature=1.0, max_tokens=16, logprobs=0)
"""A group of answers to one beginning, each token with its own log-probability alone."""
ALLOWED = 1e-4
"""Largest difference of two log-probabilities of a token under the same weights, in nats."""
RISE = 0.2
"""Between the mean rewards of the first and the last two steps, if the model has learnt."""


def reward(answer: Choice) -> float:
    """Return what an answer is worth."""
    return float("yellow" in answer.text)


class Trainer:
    """The weights in training, and what trains them.

    Args:
        checkpoint: a folder.
        rate: of learning.
    """

    def __init__(self, checkpoint: Path, rate: float) -> None:
        self.model = oracle.model(checkpoint)
        parameters = dict(self.model.named_parameters())
        self.weights = {name: each for name, each in parameters.items() if "visual" not in name}
        self._optimizer = torch.optim.AdamW(self.weights.values(), rate, weight_decay=0.0)

    def logprobs(self, outputs: Sequence[Output]) -> list[list[torch.Tensor]]:
        """Return the log-probabilities of the tokens of all answers, by prompt."""
        each = [(out.prompt_token_ids, choice) for out in outputs for choice in out.choices]
        rows = [torch.tensor([*prompt, *choice.token_ids]) for prompt, choice in each]
        # Padding comes behind an answer, and no token looks ahead.
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        every = torch.log_softmax(self.model(input_ids=padded).logits[:, :-1], dim=-1)
        taken = every.gather(2, padded[:, 1:, None])[..., 0]
        found = iter(
            row[len(prompt) - 1 :][: len(choice.token_ids)]
            for row, (prompt, choice) in zip(taken, each, strict=True)
        )
        return [[next(found) for _ in out.choices] for out in outputs]

    def learn(self, outputs: Sequence[Output], logprobs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Make what was better than its group likelier, and what was worse less likely."""
        losses = []
        for out, rows in zip(outputs, logprobs, strict=True):
            rewards = torch.tensor([reward(choice) for choice in out.choices])
            gains = rewards - rewards.mean()
            losses += [-gain * row.sum() for gain, row in zip(gains, rows, strict=True)]
        self._optimizer.zero_grad()
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def difference(outputs: Sequence[Output], logprobs: Sequence[Sequence[torch.Tensor]]) -> float:
    """Return the largest difference between the engine's log-probabilities and others."""
    largest = 0.0
    for out, rows in zip(outputs, logprobs, strict=True):
        for choice, row in zip(out.choices, rows, strict=True):
            pairs = zip(choice.token_ids, choice.logprobs or (), strict=True)
            told = torch.tensor([values[token] for token, values in pairs])
            largest = max(largest, float((row.detach() - told).abs().max()))
    return largest


def main() -> int:
    """Sample, compare, learn and update, step by step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning, for AdamW")
    given = parser.parse_args()
    trainer, means, apart = Trainer(find_checkpoint("demo"), given.rate), [], 0.0
    config = EngineConfig(device="cpu", dtype="float32", allow_weight_updates=True)
    with Pipeline("demo", config) as pipe:
        # After the last update answers are sampled once more, and nothing is learnt from them.
        for step in range(given.steps + 1):
            seeds = [1000 * step + 100 * index for index in range(len(BEGINNINGS))]
            params = [replace(SAMPLING, seed=seed) for seed in seeds]
            outputs = pipe.generate_many(BEGINNINGS, params)
            rewards = [reward(choice) for out in outputs for choice in out.choices]
            means.append(sum(rewards) / len(rewards))
            logprobs = trainer.logprobs(outputs)
            apart = max(apart, difference(outputs, logprobs))
            print(f"step {step:>2}: mean reward {means[-1]:.2f}  A red circle{outputs[0].text}")
            if step < given.steps:
                trainer.learn(outputs, logprobs)
                pipe.engine.update_weights(trainer.weights.items(), version=f"step {step + 1}")
    rise = sum(means[-2:]) / 2 - sum(means[:2]) / 2
    print(f"the mean reward rose by {rise:.2f}, and log-probabilities agree within {apart:.1e}")
    return int(rise < RISE or apart > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
