"""`vlm-serve serve` whose answers come from a script.

    python tests/scripted_server.py SCRIPT.json demo --port 8000 --response-store 64MiB

HTTP, templates, parsers, grammars, the engine and its cache are the real ones; only the sampled
tokens are replaced. A script is a list of `{"after": pattern, "answer": text}`. The first entry
whose pattern is found behind the prompt's last answer is taken, with `\\1` for its first group; a
thought that the prompt opens is closed before it.
Where no entry fits, or a grammar forbids the answer's next token, the model goes on by itself.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlm_serve.cli import main
from vlm_serve.engine.requests.plan import SampledToken, SampleTask, SequenceInfo
from vlm_serve.engine.start.build import DEMO_DIRECTORIES, find_checkpoint
from vlm_serve.engine.steps import batching
from vlm_serve.engine.steps.sampler import SequenceSampler
from vlm_serve.preprocess.text.tokenizer import Tokenizer

TURN = "<|im_start|>"


@dataclass(frozen=True)
class Script:
    """Answers by what stands behind a prompt's last answer."""

    entries: Sequence[dict[str, Any]]
    tokenizer: Tokenizer

    def tokens(self, prompt: Sequence[int]) -> list[int] | None:
        """Return the answer to a prompt, with the token that ends it; None without an entry."""
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        turn = self._new_turns(text)
        found = ((re.search(entry["after"], turn), entry["answer"]) for entry in self.entries)
        answer = next((match.expand(answer) for match, answer in found if match), None)
        end = self.tokenizer.token_to_id("<|im_end|>")
        if answer is None:
            return None
        assert end is not None
        if text.rfind("<think>") > text.rfind("</think>"):
            answer = f"I know.\n</think>\n\n{answer}"
        return [*self.tokenizer.encode(answer), end]

    def _new_turns(self, text: str) -> str:
        """Return the turns behind the last answer: agents put reminders behind a question."""
        turns = text.split(TURN)[1:-1] or [text]
        answers = [at for at, turn in enumerate(turns) if turn.startswith("assistant")]
        new = turns[answers[-1] + 1 :] if answers else turns
        return TURN.join(turn for turn in new if not turn.startswith("system"))


def sampler_of(script: Script) -> type[SequenceSampler]:
    """Return a sampler whose tokens are those of a script."""

    class ScriptedSampler(SequenceSampler):
        """Allows one token alone, unless a grammar forbids that token."""

        def __init__(self, info: SequenceInfo) -> None:
            super().__init__(info)
            self._script = script.tokens(info.token_ids)
            self.is_plain &= self._script is None

        def choose(self, raw: torch.Tensor, task: SampleTask) -> SampledToken:
            if self._script is None:
                return super().choose(raw, task)
            token = self._script[min(task.position, len(self._script) - 1)]
            if task.mask is not None and not task.mask[token // 8] >> token % 8 & 1:
                self._script = None
                return super().choose(raw, task)
            only = torch.full_like(raw, float("-inf"))
            only[token] = 0
            return super().choose(only, task)

    return ScriptedSampler


if __name__ == "__main__":
    file, model, *options = sys.argv[1:]
    assert model in DEMO_DIRECTORIES
    script = Script(json.loads(Path(file).read_text()), Tokenizer(find_checkpoint(model)))
    vars(batching)["SequenceSampler"] = sampler_of(script)
    sys.exit(main(["serve", model, *options]))
