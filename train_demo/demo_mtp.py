"""The multi-token-prediction layer, which drafts the token after next.

It is one attention layer under the published names `mtp.*`. At each token it takes the token's
embedding and the model's last hidden state of the previous token (after the final norm, with that
token's position, as in vLLM) and predicts the next token. For further drafts, its own output
replaces the hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from demo_data import IGNORE, Batch
from demo_model import DemoModel, Layer, RMSNorm
from demo_shape import DemoShape
from torch import Tensor, nn


class Drafter(nn.Module):
    """`mtp.*` of a checkpoint; embeddings and the output projection are the model's own."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(shape.hidden)
        self.pre_fc_norm_hidden = RMSNorm(shape.hidden)
        self.layers = nn.ModuleList([Layer(shape, shape.attention_every - 1)])
        self.norm = RMSNorm(shape.hidden)
        nn.init.normal_(self.fc.weight, std=0.7 * self.fc.in_features**-0.5)

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map token embeddings and previous hidden states to the output projection's input.

        All are [B, T, hidden].
        """
        pair = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        x = self.fc(torch.cat(pair, dim=-1))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.norm(x))


@dataclass(frozen=True)
class Reading:
    """The model's outputs for a batch, computed once since only the drafter learns."""

    embedded: Tensor
    """[B, T, hidden]: what the first layer reads."""
    hidden: Tensor
    """[B, T, hidden]: what the output projection reads."""
    cos: Tensor
    """[B, 1, T, rotary dimensions], and the same for `sin`."""
    sin: Tensor
    answers: Tensor
    """[B, T]: True where the next token is of an answer."""


@torch.no_grad()
def reading(model: DemoModel, batch: Batch) -> Reading:
    """Return the model's outputs for a batch."""
    embedded = model.embedded(batch, model.see(batch))
    hidden = model.language_model(embedded, batch.positions)[0]
    turn = model.language_model.rotation(batch.positions)
    return Reading(embedded, hidden, *turn, batch.targets != IGNORE)


def drafts(drafter: Drafter, read: Reading, depth: int) -> list[Tensor]:
    """Return the output of `drafter` at each place for `depth` successive tokens.

    Entry d is [B, T - 1 - d, hidden]; its place t predicts token t + d + 2.
    """
    found = []
    state = read.hidden
    for step in range(depth):
        length = read.hidden.shape[1] - 1 - step
        following = read.embedded[:, step + 1 :]
        turn = (read.cos[:, :, step : step + length], read.sin[:, :, step : step + length])
        state = drafter(following, state[:, :length], *turn)
        found.append(state)
    return found
