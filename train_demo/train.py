"""Train the dense demo checkpoint: `python train_demo/train.py OUT`.

Seeds are fixed; it uses two CPU cores. It prints the learning curve, saves its state regularly to
`OUT/state.pt` (and resumes from one). At the end it writes a checkpoint for transformers and
vlm-serve.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_chat import ChatFormat, train_tokenizer
from demo_data import IGNORE, Batch, BatchMaker, BatchSizes
from demo_experts import imbalance
from demo_export import export
from demo_heads import CellHeads, StoryHeads
from demo_model import DemoModel
from demo_optim import build_optimizers
from demo_shape import DemoShape
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SEED = 2026


class Trainee(nn.Module):
    """The model and its training aids."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.demo = DemoModel(shape)
        self.cells = CellHeads(shape.hidden)
        self.story = StoryHeads(shape.hidden)


class Plan(Dataset[Batch]):
    """The kind of batch of every step.

    Pictures alone come first, then questions about one picture, then everything. In the end a
    quarter are pictures alone again: they are cheap, and vision is left to learn.
    """

    def __init__(self, maker: BatchMaker, steps: int, warm: int, single: int, mixed: int) -> None:
        self.maker = maker
        self.steps, self.warm, self.single, self.mixed = steps, warm, single, mixed

    def __len__(self) -> int:
        return self.steps

    def kind(self, step: int) -> str:
        if step < self.warm:
            return "vision"
        if step < self.warm + self.single:
            return "image"
        draw = random.Random(f"kind:{step}")
        if step >= self.warm + self.single + self.mixed and draw.random() < 0.25:
            return "vision"
        kinds, weights = ("image", "album", "video", "text"), (0.50, 0.17, 0.29, 0.04)
        return draw.choices(kinds, weights)[0]

    def __getitem__(self, step: int) -> Batch:
        return self.maker.make(step, self.kind(step))


def losses(model: Trainee, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of the answers and of the training aids' labels."""
    seen = model.demo.see(batch)
    cells = model.cells.loss(batch, seen)
    if batch.kind == "vision":
        return torch.zeros(()), cells
    hidden, read = model.demo.states(batch, seen)
    aids = cells + model.story.loss(batch, read)
    learned = batch.targets != IGNORE
    return F.cross_entropy(model.demo.logits(hidden[learned]), batch.targets[learned]), aids


@torch.no_grad()
def accuracy(model: Trainee, batches: list[Batch]) -> dict[str, tuple[int, int]]:
    """Count right and all answers by kind.

    An answer is right if each token is the most likely one, as in greedy decoding.
    """
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for batch in batches:
        hidden = model.demo.read(batch, model.demo.see(batch))
        hits = model.demo.logits(hidden).argmax(-1) == batch.targets
        for row, kinds in enumerate(batch.turn_kinds):
            for turn, kind in enumerate(kinds):
                of_turn = batch.turns[row] == turn
                found[kind][0] += int(hits[row][of_turn].all())
                found[kind][1] += 1
    return {kind: (right, asked) for kind, (right, asked) in sorted(found.items())}


def learning_rate(step: int, steps: int) -> float:
    """Return the share of the peak: warm-up, plateau, and linear decay over the last half."""
    return min(1.0, (step + 1) / 40, 2 * (steps - step) / steps)


def held_out(chat: ChatFormat, count: int) -> list[Batch]:
    """Return conversations from held-out seeds and writers."""
    maker = BatchMaker(chat, SEED + 1, BatchSizes(image=48, album=24, video=24), split="test")
    kinds = ("image", "image", "album", "video")
    return [maker.make(i, kinds[i % 4], turns=3) for i in range(count)]


def report(model: Trainee, batches: list[Batch], *, by_kind: bool) -> None:
    found = accuracy(model, batches)
    right, asked = (sum(pair[i] for pair in found.values()) for i in (0, 1))
    print(f"  held out: {right / asked:.1%} of {asked}", flush=True)
    if by_kind:
        for kind, (hits, total) in found.items():
            print(f"    {kind:24s} {hits / total:6.1%} of {total}", flush=True)


def train(
    model: Trainee,
    plan: Plan,
    chat: ChatFormat,
    out: Path,
    *,
    muon_lr: float,
    adam_lr: float,
    aid_weight: float,
    report_every: int,
    checks: list[Batch] | None = None,
) -> None:
    """Run the plan, or the rest of it after a resume."""
    optimizers = build_optimizers(model, muon_lr=muon_lr, adam_lr=adam_lr)
    begin, state_path = 0, out / "state.pt"
    if state_path.exists():
        state = torch.load(state_path)
        begin = state["step"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    loader = DataLoader(plan, batch_size=None, sampler=range(begin, len(plan)), num_workers=1)
    checks = checks or held_out(chat, 8)
    started, seen = time.perf_counter(), defaultdict(list)
    for step, batch in enumerate(loader, begin):
        share = learning_rate(step, len(plan))
        for optimizer, peak in zip(optimizers, (muon_lr, adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        answer, aids = losses(model, batch)
        if batch.kind == "vision":
            loss = aids
        else:
            loss = answer + aid_weight * aids + 0.01 * imbalance(model)
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            # One such step makes every weight useless.
            print(f"step {step + 1} is left out: {batch.kind}, loss {loss.item()}", flush=True)
        for optimizer in optimizers:
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
        seen[batch.kind].append((answer.item(), aids.item()))
        if (step + 1) % 25 == 0:
            parts = [
                f"{kind} {sum(a for a, _ in pairs) / len(pairs):.3f}"
                f"/{sum(c for _, c in pairs) / len(pairs):.3f}"
                for kind, pairs in sorted(seen.items())
            ]
            clock = time.perf_counter() - started
            print(f"step {step + 1} {clock:.0f} s: {', '.join(parts)}", flush=True)
            seen.clear()
        if (step + 1) % report_every == 0 or step + 1 == len(plan):
            if step >= plan.warm:
                report(model, checks, by_kind=(step + 1) % (4 * report_every) == 0)
            save_state(state_path, step + 1, model, optimizers)


def save_state(
    path: Path, step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> None:
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load_tokenizer(out: Path) -> Tokenizer:
    """Return the tokenizer of an earlier run or train a new one; both are equal."""
    path = out / "tokenizer.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        train_tokenizer().save(str(path))
    return Tokenizer.from_file(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=6400)
    parser.add_argument("--warm", type=int, default=1400, help="steps on pictures alone")
    parser.add_argument("--single", type=int, default=200, help="steps on one picture each")
    parser.add_argument("--mixed", type=int, default=900, help="steps before pictures come back")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    chat = ChatFormat(load_tokenizer(args.out))
    model = Trainee(DemoShape(vocab=chat.tokenizer.get_vocab_size()))
    print(f"{sum(p.numel() for p in model.demo.parameters())} parameters", flush=True)
    plan = Plan(BatchMaker(chat, SEED), args.steps, args.warm, args.single, args.mixed)
    train(
        model,
        plan,
        chat,
        args.out,
        muon_lr=0.02,
        adam_lr=0.003,
        aid_weight=0.3,
        report_every=250,
    )
    report(model, held_out(chat, 24), by_kind=True)
    export(model.demo, chat.tokenizer, args.out / "checkpoint")


if __name__ == "__main__":
    main()
