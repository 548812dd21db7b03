"""Train the layer that drafts: `python train_demo/mtp.py CHECKPOINT OUT`.

The model stays fixed, so its outputs for a set of conversations are computed once. The layer learns
the model's own distribution of each next token of the answers, two in a row, since only answers are
drafted. Prints the acceptance rate of drafts of held-out answers by position.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_chat import ChatFormat
from demo_data import BatchMaker, BatchSizes
from demo_export import export
from demo_model import DemoModel
from demo_mtp import Drafter, Reading, drafts, reading
from demo_optim import build_optimizers
from finish import RECORDS, load
from tokenizers import Tokenizer
from torch import Tensor
from train import SEED, Plan, learning_rate

DEPTH = 2
CHECKED = 4
HELD = 4
SIZES = BatchSizes(image=10, album=7, video=5, text=10)


def loss(model: DemoModel, drafter: Drafter, read: Reading, depth: int) -> Tensor:
    """Return the cross-entropy of drafted answer tokens with the model's own distributions."""
    total = torch.zeros(())
    for step, state in enumerate(drafts(drafter, read, depth), 1):
        learned = read.answers[:, step:]
        own = model.logits(read.hidden[:, step:][learned]).softmax(-1)
        total = total + F.cross_entropy(model.logits(state[learned]), own)
    return total / depth


@torch.no_grad()
def accepted(model: DemoModel, drafter: Drafter, readings: list[Reading]) -> list[float]:
    """Return the share of accepted drafts by position; a draft needs all before it accepted."""
    right, asked = [0] * CHECKED, [0] * CHECKED
    for read in readings:
        choices = model.logits(read.hidden).argmax(-1)
        so_far = read.answers
        for step, state in enumerate(drafts(drafter, read, CHECKED), 1):
            ours = choices[:, step:]
            learned = read.answers[:, step:] & so_far[:, : ours.shape[1]]
            hits = learned & (model.logits(state).argmax(-1) == ours)
            asked[step - 1] += int(learned.sum())
            right[step - 1] += int(hits.sum())
            so_far = hits
    return [r / max(1, a) for r, a in zip(right, asked, strict=True)]


def print_accepted(model: DemoModel, drafter: Drafter, readings: list[Reading]) -> None:
    shares = ", ".join(f"{share:.1%}" for share in accepted(model, drafter, readings))
    print(f"  accepted by position: {shares}", flush=True)


def train(model: DemoModel, drafter: Drafter, readings: list[Reading], steps: int) -> None:
    """Train on one token in the first half of the steps, on two in a row after it.

    The last `HELD` readings are held out for checks.
    """
    learned, checks = readings[:-HELD], readings[-HELD:]
    peaks = (0.02, 0.003)
    optimizers = build_optimizers(drafter, muon_lr=peaks[0], adam_lr=peaks[1])
    draw, begun = random.Random(SEED), time.perf_counter()
    order: list[Reading] = []
    for step in range(steps):
        order = order or draw.sample(learned, len(learned))
        share = learning_rate(step, steps)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        value = loss(model, drafter, order.pop(), 1 if step < steps // 2 else DEPTH)
        torch.autograd.backward(value)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 25 == 0:
            seconds = time.perf_counter() - begun
            print(f"step {step + 1} {seconds:.0f} s: {value.item():.3f}", flush=True)
        if (step + 1) % 90 == 0 or step + 1 == steps:
            print_accepted(model, drafter, checks)


def read_all(model: DemoModel, chat: ChatFormat, batches: int) -> list[Reading]:
    """Return readings of `batches` to learn from, and of `HELD` to check."""
    maker = BatchMaker(chat, SEED + 5, SIZES, records=RECORDS / 2)
    plan = Plan(maker, batches, warm=0, single=0, mixed=batches)
    held = BatchMaker(chat, SEED + 1, SIZES, split="test", records=RECORDS / 2)
    kinds = ("image", "album", "video", "text")
    checks = [held.make(i, kinds[i]) for i in range(HELD)]
    return [reading(model, batch) for batch in (*(plan[i] for i in range(batches)), *checks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batches", type=int, default=70, help="to learn from")
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED + 5)
    chat = ChatFormat(Tokenizer.from_file(str(args.checkpoint / "tokenizer.json")))
    model = load(args.checkpoint, chat).demo.requires_grad_(False)
    drafter = Drafter(model.shape)
    train(model, drafter, read_all(model, chat, args.batches), args.steps)
    export(model, chat.tokenizer, args.out / "checkpoint", drafter)


if __name__ == "__main__":
    main()
