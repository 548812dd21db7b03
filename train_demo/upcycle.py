"""Train the mixture-of-experts demo checkpoint from the dense one:
`python train_demo/upcycle.py DENSE OUT`, where DENSE is the folder of a run of teach.py.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from demo_chat import ChatFormat
from demo_experts import upcycle
from demo_export import export
from demo_lessons import Lessons
from demo_shape import DemoShape
from teach import SIZES, Course, held_out_lessons
from tokenizers import Tokenizer
from train import SEED, Trainee, report, train

EXPERTS = 4
SHARES = "image 29, vision 10, forms 24, names 14, told 6, talk 2, video 10, album 5"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dense", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED + 2)
    args.out.mkdir(parents=True, exist_ok=True)
    chat = ChatFormat(Tokenizer.from_file(str(args.dense / "checkpoint" / "tokenizer.json")))
    shape = DemoShape(vocab=chat.tokenizer.get_vocab_size())
    dense = Trainee(shape)
    dense.load_state_dict(torch.load(args.dense / "state.pt")["model"])
    model = Trainee(replace(shape, experts=EXPERTS))
    upcycle(dense.demo.state_dict(), model.demo)
    model.cells.load_state_dict(dense.cells.state_dict())
    model.story.load_state_dict(dense.story.state_dict())
    print(f"{sum(p.numel() for p in model.demo.parameters())} parameters", flush=True)
    report(model, held_out_lessons(chat, 8), by_kind=False)
    plan = Course(Lessons(chat, SEED + 2, SIZES, records=0.25), args.steps, [(0, SHARES)])
    train(
        model,
        plan,
        chat,
        args.out,
        muon_lr=0.001,
        adam_lr=0.0002,
        aid_weight=0.1,
        report_every=100,
        checks=held_out_lessons(chat, 8),
    )
    report(model, held_out_lessons(chat, 24), by_kind=True)
    export(model.demo, chat.tokenizer, args.out / "checkpoint")


if __name__ == "__main__":
    main()
