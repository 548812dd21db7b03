"""Tune three adapters of the demo model for a few minutes, and serve them side by side.

    python examples/tune_adapters.py [--seconds 120] [--folder adapters]

Each adapter learns to answer questions about the pictures in `examples/media` in a manner of its
own. It is tuned with transformers alone: rank 8 beside the text's projections, saved in PEFT's
form. Then one engine answers the same question with each of them, in one batch; a server does it
with

    vlm-serve serve demo --lora-modules shout=adapters/shout,brief=adapters/brief

and requests whose `model` is `shout` or `brief`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vlm_serve import EngineConfig, LoRA, Pipeline, SamplingParams
from vlm_serve.engine.start.build import find_checkpoint

MEDIA = Path(__file__).parent / "media"
RANK, ALPHA = 8, 16
LEARNT = 0.05
"""Loss of every answer at the end of tuning."""
QUESTIONS = {
    "What color is the star?": "red",
    "What is at the top right?": "triangle",
    "How many shapes are there?": "3",
}
"""Questions about `shapes.png`, and the word that matters."""
MANNERS = {
    "shout": {"red": "RED!", "triangle": "TRIANGLE!", "3": "THREE!"},
    "brief": {"red": "red", "triangle": "triangle", "3": "3"},
    "french": {"red": "rouge", "triangle": "un triangle", "3": "trois"},
}


class Tuned(torch.nn.Module):
    """A projection with its low-rank change."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        out, depth = base.weight.shape
        self.down = torch.nn.Parameter(torch.randn(RANK, depth) / math.sqrt(depth))
        self.up = torch.nn.Parameter(torch.zeros(out, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = x @ self.down.T @ self.up.T
        result: torch.Tensor = self.base(x) + change * (ALPHA / RANK)
        return result


def examples(pipe: Pipeline, manner: dict[str, str], tokenizer: Any) -> list[tuple[Any, Any, int]]:
    """Return (prompt, tokens, answer's first position) of every question."""
    found = []
    for question, word in QUESTIONS.items():
        prompt = pipe.engine.preprocessor.prepare([message(question)])
        answer = tokenizer(manner[word] + "<|im_end|>").input_ids
        found.append((prompt, [*prompt.token_ids, *answer], len(prompt)))
    return found


def message(question: str) -> dict[str, Any]:
    """A question about the picture."""
    picture = {"type": "image", "image": str(MEDIA / "shapes.png")}
    return {"role": "user", "content": [picture, {"type": "text", "text": question}]}


def inputs_of(prompt: Any, tokens: list[int], config: Any) -> dict[str, torch.Tensor]:
    """The tensors that transformers takes for a prompt with one picture and its answer."""
    ids = torch.tensor([tokens])
    item, span = prompt.media[0], prompt.spans[0]
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == config.image_token_id).long(),
        "pixel_values": item.patches(span.patch),
        "image_grid_thw": torch.tensor([span.grid]),
    }


def tune(
    checkpoint: Path, pipe: Pipeline, manner: dict[str, str], seconds: float
) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors under PEFT's names, tuned for so many seconds at most."""
    import oracle  # transformers, also beside a torchvision without its compiled ops

    torch.manual_seed(0)
    model = copy.deepcopy(oracle.model(checkpoint))
    tuned: dict[str, Tuned] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and "language_model.layers" in name:
            parent, _, own = name.rpartition(".")
            tuned[name] = Tuned(module)
            setattr(model.get_submodule(parent), own, tuned[name])
    weights = [each for part in tuned.values() for each in (part.down, part.up)]
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    data = examples(pipe, manner, oracle.tokenizer(checkpoint))
    ends, step, losses = time.monotonic() + seconds, 0, [math.inf] * len(data)
    while max(losses) > LEARNT and time.monotonic() < ends:
        prompt, tokens, first = data[step % len(data)]
        logits = model(**inputs_of(prompt, tokens, model.config)).logits[0, first - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[first:]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses[step % len(data)] = float(loss.detach())
        step += 1
    early = "" if max(losses) <= LEARNT else ": not learnt yet, give it more --seconds"
    print(f"  {step} steps, largest loss {max(losses):.3f}{early}")
    return {
        f"base_model.model.{name}.lora_{kind}.weight": factor.detach().contiguous()
        for name, part in tuned.items()
        for kind, factor in (("A", part.down), ("B", part.up))
    }


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write an adapter as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def main() -> None:
    """Tune, load and ask."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="for each of three adapters, at most"
    )
    parser.add_argument("--folder", type=Path, default=Path("adapters"))
    given = parser.parse_args()
    with Pipeline("demo", EngineConfig(device="cpu")) as pipe:
        for name, manner in MANNERS.items():
            print(f"tuning {name}")
            tensors = tune(find_checkpoint("demo"), pipe, manner, given.seconds)
            save(given.folder / name, tensors)
        loras: list[LoRA | None] = [None]
        loras += [LoRA(name, given.folder / name) for name in MANNERS]
        for question in QUESTIONS:
            chats = [[message(question)] for _ in loras]
            greedy = SamplingParams(temperature=0, max_tokens=24)
            answers = pipe.chat_many(chats, greedy, lora=loras)
            print(question)
            for lora, answer in zip(loras, answers, strict=True):
                print(f"  {lora.name if lora else 'demo'}: {answer.text}")


if __name__ == "__main__":
    main()
