"""Teach a trained demo checkpoint what clients send:
`python examples/train_demo/teach.py CHECKPOINT OUT`.

CHECKPOINT is that of `finish.py`. All is trained together, see `demo_lessons`. It saves its state
to `OUT/state.pt` (and resumes from one).
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from demo_chat import ChatFormat
from demo_data import Batch, BatchSizes
from demo_export import export
from demo_lessons import Lessons
from demo_vocabulary import teaching_tokenizer, widen
from finish import load
from tokenizers import Tokenizer
from train import SEED, Plan, Trainee, report, train

SIZES = BatchSizes(image=10, album=8, video=6, vision=24)
KINDS = {"image": 0.38, "forms": 0.26, "talk": 0.09, "video": 0.16, "album": 0.07, "long": 0.04}
COPYING = {
    "image": 0.22,
    "forms": 0.24,
    "talk": 0.09,
    "recall": 0.19,
    "video": 0.12,
    "album": 0.06,
    "vision": 0.05,
    "long": 0.03,
}


class Course(Plan):
    """The kind of batch of every step."""

    def __init__(self, maker: Lessons, steps: int) -> None:
        super().__init__(maker, steps, warm=0, single=0, mixed=steps)
        self.kinds = COPYING if maker.copying else KINDS

    def kind(self, step: int) -> str:
        draw = random.Random(f"lesson:{step}")
        return draw.choices(list(self.kinds), list(self.kinds.values()))[0]


def held_out_lessons(chat: ChatFormat, count: int, *, copying: bool = False) -> list[Batch]:
    """Return conversations from held-out seeds, writers and names."""
    sizes = BatchSizes(image=24, album=12, video=12)
    maker = Lessons(chat, SEED + 7, sizes, split="test", records=0.2)
    maker.copying = copying
    kinds = ("forms", "image", "forms", "talk", "video", "album", "talk", "long")
    return [maker.make(i, kinds[i % len(kinds)]) for i in range(count)]


def start(checkpoint: Path, out: Path, *, copying: bool) -> tuple[Trainee, ChatFormat]:
    """Return the checkpoint's model; for copies, with a wider vocabulary."""
    old = ChatFormat(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    path = out / "tokenizer.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        (teaching_tokenizer() if copying else old.tokenizer).save(str(path))
    new = ChatFormat(Tokenizer.from_file(str(path)))
    return widen(load(checkpoint, old), old, new), new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--muon", type=float, default=0.008)
    parser.add_argument("--adam", type=float, default=0.0015)
    parser.add_argument("--digits", type=float, default=0.0, help="share of further digits")
    parser.add_argument("--copying", action="store_true", help="with names and values to copy")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED + 6)
    model, chat = start(args.checkpoint, args.out, copying=args.copying)
    print(f"{sum(p.numel() for p in model.demo.parameters())} parameters", flush=True)
    maker = Lessons(chat, SEED + 6, SIZES, records=0.25)
    maker.copying, maker.digits = args.copying, args.digits
    train(
        model,
        Course(maker, args.steps),
        chat,
        args.out,
        muon_lr=args.muon,
        adam_lr=args.adam,
        aid_weight=0.1 if args.copying else 0.0,
        report_every=250,
        checks=held_out_lessons(chat, 8, copying=args.copying),
    )
    report(model, held_out_lessons(chat, 24, copying=args.copying), by_kind=True)
    export(model.demo, chat.tokenizer, args.out / "checkpoint")


if __name__ == "__main__":
    main()
