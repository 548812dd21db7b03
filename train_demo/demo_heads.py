"""Training aids: linear heads that predict the labels of every picture token.

They are discarded after training. Labels for every token teach in a few hundred steps what answers
alone teach in many thousands, since a wrong answer tells little about its cause.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from demo_data import Batch
from demo_patches import NUM_COLOURS, NUM_KINDS, NUM_PLACES
from torch import Tensor, nn


class CellHeads(nn.Module):
    """Predicts the content of a picture cell from its embedding, to train the vision tower."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        sizes = {
            "colour": NUM_COLOURS,
            "kind": NUM_KINDS,
            "place": NUM_PLACES,
            "size": 3,
            "centre": 2,
        }
        self.heads = nn.ModuleDict({name: nn.Linear(hidden, n) for name, n in sizes.items()})

    def loss(self, batch: Batch, seen: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for slot, embeddings in zip(batch.slots, seen, strict=True):
            for name, head in self.heads.items():
                scores = head(embeddings).flatten(0, 1)
                # Most cells are background.
                weight = torch.ones(scores.shape[-1])
                weight[0] = 0.3
                labels = getattr(slot.labels, name).flatten()
                total = total + F.cross_entropy(scores, labels, weight)
        return total / max(1, len(batch.slots))


class StoryHeads(nn.Module):
    """Predicts a token's picture (of an album) or second (of a video), and what is new there.

    The input is that of the last layer, where answers look these facts up.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        sizes = {"order": 8, "fresh": 2, "count": 9}
        self.norm = nn.RMSNorm(hidden)
        self.heads = nn.ModuleDict({name: nn.Linear(hidden, n) for name, n in sizes.items()})

    def loss(self, batch: Batch, read: Tensor) -> Tensor:
        total = torch.zeros(())
        normed = self.norm(read).flatten(0, 1)
        for slot in batch.slots:
            if slot.story is None:
                continue
            tokens = normed[slot.places]
            for name, head in self.heads.items():
                labels = getattr(slot.story, name).repeat_interleave(slot.rows * slot.columns)
                total = total + F.cross_entropy(head(tokens), labels)
        return total / max(1, len(batch.slots))
