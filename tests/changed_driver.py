"""A model's steps with adapters: each token its own, and rows alone as in company."""

from __future__ import annotations

from dataclasses import replace

import torch
from model_driver import Driver, text_sequence

from vlm_serve.kernels.linear.low_rank import RowChanges
from vlm_serve.models import Model
from vlm_serve.models.adapters import Adapter


class ChangedDriver(Driver):
    """A driver with adapters for tokens: one for all, or one a sequence."""

    def __init__(
        self, model: Model, adapters: list[Adapter], *, compiled: bool, ranks: int = 1
    ) -> None:
        super().__init__(model, ranks=ranks)
        if compiled:
            model.compile_steps(self.caches)
        self._changes = [each.changes for each in adapters]
        self.of_tokens: list[int] = []
        run = self.forward

        def forward(batch, caches):  # type: ignore[no-untyped-def]
            changes = RowChanges(self._changes, self.of_tokens)
            return run(replace(batch, changes=changes), caches)

        self.forward = forward


def rows_alone_and_together(model: Model, adapters: list[Adapter], *, compiled: bool) -> None:
    """Assert the bits of each sequence alone, with all adapters and with none."""
    prompts = [[(11 * n * n + 5 * one) % 300 for n in range(20 + one)] for one in range(5)]
    owners = [one % (1 + len(adapters)) - 1 for one in range(5)]

    def run(chosen: list[int]) -> list[list[torch.Tensor]]:
        driver = ChangedDriver(model, adapters, compiled=compiled)
        driver.deterministic = not compiled
        sequences = [text_sequence(prompts[one]) for one in chosen]
        driver.of_tokens = [owners[one] for one in chosen for _ in prompts[one]]
        first = driver.step(
            prefills=[(each, 0, len(each.tokens)) for each in sequences], all_logits=False
        )
        found = [[row] for row in first.logits]
        for _ in range(3):
            for each, rows in zip(sequences, found, strict=True):
                each.tokens.append(int(rows[-1].argmax()))
            driver.of_tokens = [owners[one] for one in chosen]
            for rows, row in zip(found, driver.step(decodes=sequences).logits, strict=True):
                rows.append(row)
        return found

    together = run(list(range(5)))
    plain = ChangedDriver(model, adapters, compiled=compiled)
    plain.deterministic = not compiled
    plain.of_tokens = [-1] * len(prompts[0])
    base = plain.prefill(text_sequence(prompts[0]))[-1]
    for one in range(5):
        (alone,) = run([one])
        steps = len(alone) if compiled else 1  # by ops, decode-only steps are never padded
        for mixed, own in zip(together[one][:steps], alone[:steps], strict=True):
            assert torch.equal(mixed, own), one
    assert torch.equal(base, together[0][0])
