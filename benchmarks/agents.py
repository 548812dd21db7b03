"""Measure what agents reuse: loops of tool calls over HTTP, whose clients send parsed answers back.

    python benchmarks/agents.py [--sessions 20] [--calls 12] [--clients 8] [--template NAME ...]

Every session asks two questions. Each takes half of the calls, and then an answer in words. A small
random checkpoint answers with default options, behind a template of published behaviour; its tokens
are chosen by a script, one by one, as if drawn. A script says what the template would write, which
is what a trained model does; one answer in eight has a line break more.

Reusable are the tokens up to the deepest cut point of a prompt whose prefix was computed before the
request was sent: as if every cut had its snapshot. The second side keeps no ends of answers. With
`--pictures` the first question comes with a photograph, another one for each session.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import numpy as np
import torch
from common.agent_script import CLOSING, TOOLS, Script, called, sent_back, written
from common.machine import describe
from make_checkpoint import make_checkpoint
from PIL import Image
from published_templates import NAMES, source_of
from serving import RunningServer, ok, running

from vlm_serve.cache.matching import key_at
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.sequence import Sequence
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.identity.keys import PromptKeys
from vlm_serve.preprocess.text.template import ChatTemplate
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

TEMPLATES = ("keeps thoughts", "drops thoughts")
SLOPPY = 8
"""One answer in so many has a line break that the template does not write."""


@dataclass(slots=True)
class Totals:
    """Tokens of all prompts."""

    prompt: int = 0
    possible: int = 0
    cached: int = 0
    answered: int = 0

    @property
    def share(self) -> float:
        return 100.0 * self.cached / max(1, self.possible)


class Ledger:
    """Keys of all prefixes that were computed so far, and what each request could reuse of them."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._seen: set[bytes] = set()
        self._lock = threading.Lock()

    def possible(self, keys: PromptKeys) -> int:
        """Return the deepest cut point of a prompt that has been computed."""
        with self._lock:
            for cut in reversed(keys.cuts):
                usable = cut < len(keys) and not keys.inside_span(cut)
                if usable and key_at(keys, cut) in self._seen:
                    return cut
        return 0

    def add(self, keys: PromptKeys, possible: int, report: dict[str, Any]) -> None:
        """Add a request: its prompt and answer are computed now."""
        with self._lock:
            self._seen.update(keys.block_keys, keys.tails.values())
            self.totals.prompt += report["prompt_tokens"]
            self.totals.possible += possible
            # Others may have computed more of it since: of the common beginning alone.
            self.totals.cached += min(report["boundary"], possible)
            self.totals.answered += report["answer_tokens"]


class Agents:
    """Runs sessions against a server.

    Args:
        server: the server; its engine draws what the scripts say.
        scripts: the sessions.
        template: the chat template of the server.
        thoughts: clients send thoughts back.
    """

    def __init__(
        self,
        server: RunningServer,
        scripts: list[Script],
        template: ChatTemplate,
        *,
        thoughts: bool,
    ) -> None:
        self.ledger = Ledger()
        self._server, self._scripts, self._template = server, scripts, template
        self._thoughts = thoughts
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        engine = server.engine
        submit = engine.submit

        def scripted(prompt: Any, *arguments: Any, **options: Any) -> Any:
            forced = self._answers[prompt.token_ids]
            return submit(prompt, *arguments, forced=(forced,), **options)

        engine.submit = scripted

    def run(self, clients: int) -> Totals:
        """Run all sessions, `clients` of them at a time."""
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(self._session, self._scripts))
        self._server.engine.check()
        return self.ledger.totals

    def _session(self, script: Script) -> None:
        messages: list[dict[str, Any]] = []
        for step in range(script.steps):
            messages += script.question(step)
            messages += self._answer(script, step, messages)

    def _answer(
        self, script: Script, step: int, messages: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        preprocessor = self._server.engine.preprocessor
        prompt = preprocessor.prepare(messages, tools=TOOLS)
        text = written(self._template, script.answer(step), prompt.text)
        if (script.number + step) % SLOPPY == 0:
            text += "\n"
        tokens = preprocessor.tokenizer
        end = tokens.special_tokens[CLOSING]
        self._answers[prompt.token_ids] = (*_marked(tokens, text), end)
        possible = self.ledger.possible(prompt.keys)
        body = {"messages": messages, "tools": TOOLS, "temperature": 0, "cache_report": True}
        made = ok(self._server.post("/v1/chat/completions", body | {"max_tokens": 1024}))
        keys = prompt.keys.fork()
        keys.extend(self._answers[prompt.token_ids])
        self.ledger.add(keys, possible, made["cache_report"])
        said = made["choices"][0]["message"]
        results = [script.result(step, call) for call in called(said)]
        wanted = "tool_calls" in script.answer(step)
        assert bool(results) == wanted, f"the parser read {said} from {text!r}"
        return [sent_back(said, thoughts=self._thoughts), *results]


def _marked(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode an answer; tags that are tokens of their own count as such."""
    ids: list[int] = []
    at = 0
    for match in tokenizer.special_pattern.finditer(text):
        ids += tokenizer.encode_plain(text[at : match.start()])
        ids.append(tokenizer.special_tokens[match.group()])
        at = match.end()
    return ids + tokenizer.encode_plain(text[at:])


def photograph(number: int) -> str:
    """A data: URL of noise, another one for each session."""
    noise = np.random.default_rng(number).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(noise).save(data, "png")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


@contextmanager
def serving(checkpoint: Path, template: Path, ends: str) -> Iterator[RunningServer]:
    # The time plays no part, and the clients need the other processors.
    config = EngineConfig(
        dtype="float32",
        cache_memory="512MiB",
        threads=1,
        chat_template=str(template),
        prefix_cache_answer_ends=ends,
    )
    engine = Engine.from_checkpoint(str(checkpoint), config)
    with running(engine, ServerConfig(port=0, idle_check=False)) as server:
        yield server


def measure(
    checkpoint: Path, name: str, ends: str, scripts: Callable[[], list[Script]], clients: int
) -> Totals:
    """Run all sessions behind one template on a fresh server."""
    source = source_of(name)
    path = checkpoint.parent / "template.jinja"
    path.write_text(source)
    with serving(checkpoint, path, ends) as server:
        names = server.engine.preprocessor.tokenizer.special_names
        agents = Agents(server, scripts(), ChatTemplate(source, names), thoughts=True)
        return agents.run(clients)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--calls", type=int, default=12, help="tool calls of a session")
    parser.add_argument("--clients", type=int, default=8, help="sessions at a time")
    parser.add_argument("--template", nargs="+", choices=NAMES, default=list(TEMPLATES))
    parser.add_argument("--pictures", action="store_true")
    given = parser.parse_args()
    # A drawn token is forced, and still computed alone: no replay of what another engine has said.
    Sequence.replaying = property(lambda sequence: False)  # type: ignore[assignment]

    def scripts() -> list[Script]:
        return [
            Script(number, given.calls // 2, photograph(number) if given.pictures else None)
            for number in range(given.sessions)
        ]

    print(describe(torch.get_num_threads()))
    print("| template | ends | prompt tokens | reusable | reused | share | from answers |")
    print("|---|---|---|---|---|---|---|")
    worst = 100.0
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "checkpoint")
        for name in given.template:
            for ends in ("auto", "off"):
                totals = measure(checkpoint, name, ends, scripts, given.clients)
                worst = min(worst, totals.share) if ends == "auto" else worst
                row = (
                    f"{totals.prompt} | {totals.possible} | {totals.cached} | {totals.share:.2f} %"
                )
                print(f"| {name} | {ends} | {row} | {totals.answered} |", flush=True)
    return 0 if worst >= 99.0 else 1


if __name__ == "__main__":
    sys.exit(main())
