"""Teach a trained demo checkpoint what clients send:
`python train_demo/teach.py CHECKPOINT OUT`.

CHECKPOINT is that of `finish.py`. Copying comes first: without a course of its own it is not
learned. Then all is trained together, see `demo_lessons`. It saves its state to `OUT/state.pt` (and
resumes from one).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from demo_chat import ChatFormat
from demo_data import Batch, BatchMaker, BatchSizes
from demo_export import export
from demo_lessons import Lessons
from finish import load
from tokenizers import Tokenizer
from train import SEED, Plan, Trainee, report, train

SIZES = BatchSizes(image=10, album=8, video=6, vision=24)
END = 10_700
PARTS = (
    (700, "copies 70, image 14, vision 4, video 8, album 4"),
    (
        1500,
        "image 24, vision 13, forms 25, talk 11, copies 3, recall 5, video 12, album 5, long 2",
    ),
    (
        3000,
        "image 18, vision 10, forms 27, fields 14, talk 9, copies 1, recall 5, "
        "video 10, album 4.5, long 1.5",
    ),
    (
        6000,
        "image 22, vision 10, forms 27, fields 9, talk 7, recall 4, video 15, album 5, long 1",
    ),
    (
        7200,
        "image 20, vision 8, forms 26, fields 6, names 9, talk 8, recall 3, "
        "video 14, album 5, long 1",
    ),
    (
        8400,
        "image 20, vision 6, forms 26, fields 3, names 10, talk 5, recall 2, "
        "video 22, album 5, long 1",
    ),
    (
        9000,
        "image 34, vision 13, forms 22, fields 1, names 6, talk 3, video 13, album 7, long 1",
    ),
    (
        END,
        "image 29, vision 11, forms 21, names 4, told 13, talk 3, video 12, album 6, long 1",
    ),
)
"""Shares of the kinds of batches until a step. Copying comes first; each later part gives more to
what was worst before it."""
AIDS = {"image": 0.3, "vision": 0.3, "video": 0.2, "album": 0.2}
HEAD_STEPS = 80


class Course(Plan):
    """The kind of batch of every step: copying first, then everything."""

    def __init__(
        self, maker: BatchMaker, steps: int, parts: Sequence[tuple[int, str]] = PARTS
    ) -> None:
        super().__init__(maker, steps, warm=0, single=0, mixed=steps)
        self.parts = [(end, dict(_shares(text))) for end, text in parts]

    def kind(self, step: int) -> str:
        draw = random.Random(f"lesson:{step}")
        kinds = next((kinds for end, kinds in self.parts if step < end), self.parts[-1][1])
        return draw.choices(list(kinds), list(kinds.values()))[0]


def _shares(text: str) -> Iterator[tuple[str, float]]:
    for each in text.split(", "):
        kind, share = each.split()
        yield kind, float(share)


def held_out_lessons(chat: ChatFormat, count: int) -> list[Batch]:
    """Return conversations from held-out seeds, writers and names."""
    sizes = BatchSizes(image=24, album=12, video=12)
    maker = Lessons(chat, SEED + 7, sizes, split="test", records=0.2)
    kinds = ("forms", "image", "forms", "talk", "video", "album", "talk", "copies")
    return [maker.make(i, kinds[i % len(kinds)]) for i in range(count)]


def fit_heads(model: Trainee, maker: BatchMaker, steps: int) -> None:
    """Train the training aids alone, since a checkpoint does not contain them."""
    heads = [*model.cells.parameters(), *model.story.parameters()]
    optimizer = torch.optim.AdamW(heads, lr=0.01, weight_decay=0.0)
    kinds = random.Random("heads").choices(list(AIDS), list(AIDS.values()), k=steps)
    for step, kind in enumerate(kinds):
        batch = maker.make(step, kind)
        with torch.no_grad():
            seen = model.demo.see(batch)
            read = None if kind == "vision" else model.demo.states(batch, seen)[1]
        loss = model.cells.loss(batch, seen)
        if read is not None:
            loss = loss + model.story.loss(batch, read)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if (step + 1) % 20 == 0:
            print(f"heads {step + 1}: {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=END)
    parser.add_argument("--muon", type=float, default=0.015)
    parser.add_argument("--adam", type=float, default=0.0025)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED + 6)
    args.out.mkdir(parents=True, exist_ok=True)
    chat = ChatFormat(Tokenizer.from_file(str(args.checkpoint / "tokenizer.json")))
    model = load(args.checkpoint, chat)
    print(f"{sum(p.numel() for p in model.demo.parameters())} parameters", flush=True)
    maker = Lessons(chat, SEED + 6, SIZES, records=0.25)
    if not (args.out / "state.pt").exists():
        fit_heads(model, Lessons(chat, SEED + 8, SIZES, records=0.25), HEAD_STEPS)
    train(
        model,
        Course(maker, args.steps),
        chat,
        args.out,
        muon_lr=args.muon,
        adam_lr=args.adam,
        aid_weight=0.2,
        report_every=300,
        checks=held_out_lessons(chat, 8),
    )
    report(model, held_out_lessons(chat, 24), by_kind=True)
    export(model.demo, chat.tokenizer, args.out / "checkpoint")


if __name__ == "__main__":
    main()
