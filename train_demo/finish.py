"""Teach a trained demo checkpoint to fill JSON:
`python train_demo/finish.py CHECKPOINT OUT`.

This is the last step of the recipe, for both the dense checkpoint and the mixture of experts. It
continues from the checkpoint's weights at a low rate, on all kinds of conversations. A share of
them has one answer in JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from demo_chat import ChatFormat
from demo_data import Batch, BatchMaker, BatchSizes
from demo_export import export
from demo_shape import DemoShape
from safetensors.torch import load_file
from tokenizers import Tokenizer
from train import SEED, Plan, Trainee, held_out, report, train

RECORDS = 0.8


def load(checkpoint: Path, chat: ChatFormat) -> Trainee:
    """Load the checkpoint's model in float32, without its drafting layer.

    The training aids are new and unused.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    shape = DemoShape(vocab=chat.tokenizer.get_vocab_size())
    text = config["text_config"]
    if text.get("num_experts"):
        width = text["moe_intermediate_size"]
        shape = replace(shape, experts=text["num_experts"], expert_intermediate=width)
    model = Trainee(shape)
    weights = load_file(checkpoint / "model.safetensors")
    own = {name: each for name, each in weights.items() if not name.startswith("mtp.")}
    model.demo.load_state_dict(own)
    return model


def held_out_records(chat: ChatFormat, count: int) -> list[Batch]:
    """Return conversations with JSON from held-out seeds and writers."""
    sizes = BatchSizes(image=48, album=24, video=24)
    maker = BatchMaker(chat, SEED + 4, sizes, split="test", records=1.0)
    kinds = ("image", "album", "video", "text")
    return [maker.make(i, kinds[i % 4], turns=2) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED + 3)
    args.out.mkdir(parents=True, exist_ok=True)
    chat = ChatFormat(Tokenizer.from_file(str(args.checkpoint / "tokenizer.json")))
    model = load(args.checkpoint, chat)
    report(model, held_out(chat, 8), by_kind=False)
    maker = BatchMaker(chat, SEED + 3, records=RECORDS)
    train(
        model,
        Plan(maker, args.steps, warm=0, single=0, mixed=args.steps),
        chat,
        args.out,
        muon_lr=0.008,
        adam_lr=0.0015,
        aid_weight=0.0,
        report_every=200,
    )
    report(model, held_out(chat, 24), by_kind=True)
    report(model, held_out_records(chat, 8), by_kind=True)
    export(model.demo, chat.tokenizer, args.out / "checkpoint")


if __name__ == "__main__":
    main()
