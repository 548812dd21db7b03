"""Train the layer that drafts: `python examples/train_demo/mtp.py CHECKPOINT OUT`.

The model itself stays as it is. Answers are what is drafted, so answers are what is learned, two
tokens in a row. Prints how many drafts of held-out answers a greedy model accepts, by position.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_chat import ChatFormat
from demo_data import IGNORE, Batch, BatchMaker
from demo_export import export
from demo_model import DemoModel
from demo_mtp import Drafter, drafts
from demo_optim import build_optimizers
from finish import RECORDS, load
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from train import SEED, Plan, held_out, learning_rate

DEPTH = 2
CHECKED = 4


def loss(model: DemoModel, drafter: Drafter, batch: Batch) -> Tensor:
    """Cross-entropy of the drafts of the answers' tokens."""
    total = torch.zeros(())
    for step, read in enumerate(drafts(model, drafter, batch, DEPTH), 1):
        targets = batch.targets[:, step:]
        learned = targets != IGNORE
        total = total + F.cross_entropy(model.logits(read[learned]), targets[learned])
    return total


@torch.no_grad()
def accepted(model: DemoModel, drafter: Drafter, batches: list[Batch]) -> list[float]:
    """Share of drafts that equal the model's own choice, by position, if all before them did."""
    right, asked = [0] * CHECKED, [0] * CHECKED
    for batch in batches:
        choices = model.logits(model.read(batch, model.see(batch))).argmax(-1)
        so_far = batch.targets != IGNORE
        for step, read in enumerate(drafts(model, drafter, batch, CHECKED), 1):
            ours = choices[:, step:]
            learned = (batch.targets[:, step:] != IGNORE) & so_far[:, : ours.shape[1]]
            hits = learned & (model.logits(read).argmax(-1) == ours)
            asked[step - 1] += int(learned.sum())
            right[step - 1] += int(hits.sum())
            so_far = hits
    return [r / max(1, a) for r, a in zip(right, asked, strict=True)]


def print_accepted(model: DemoModel, drafter: Drafter, batches: list[Batch]) -> None:
    shares = ", ".join(f"{share:.1%}" for share in accepted(model, drafter, batches))
    print(f"  accepted by position: {shares}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED + 5)
    chat = ChatFormat(Tokenizer.from_file(str(args.checkpoint / "tokenizer.json")))
    model = load(args.checkpoint, chat).demo.requires_grad_(False)
    drafter = Drafter(model.shape)
    maker = BatchMaker(chat, SEED + 5, records=RECORDS / 2)
    plan = Plan(maker, args.steps, warm=0, single=0, mixed=args.steps)
    checks = held_out(chat, 8)
    peaks = (0.02, 0.003)
    optimizers = build_optimizers(drafter, muon_lr=peaks[0], adam_lr=peaks[1])
    for step, batch in enumerate(DataLoader(plan, batch_size=None, num_workers=1)):
        share = learning_rate(step, args.steps)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        value = loss(model, drafter, batch)
        torch.autograd.backward(value)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: {value.item():.3f}", flush=True)
        if (step + 1) % 200 == 0 or step + 1 == args.steps:
            print_accepted(model, drafter, checks)
    export(model, chat.tokenizer, args.out / "checkpoint", drafter)


if __name__ == "__main__":
    main()
