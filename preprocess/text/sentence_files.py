"""What sentence-transformers' files say of an embedder: pooling, normalisation and prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlm_serve.errors import CheckpointError, InvalidRequestError
from vlm_serve.preprocess.text.tokenizer import Tokenizer, read_json

_KNOWN = {"Transformer", "Pooling", "Normalize", "pooling_mode_lasttoken"}


@dataclass(frozen=True, slots=True)
class Sentences:
    """Texts before an input, by name; the name that need not be given; whether vectors have a
    length of 1."""

    prompts: Mapping[str, str]
    usual: str | None
    normalised: bool

    @classmethod
    def of(cls, path: Path) -> Sentences | None:
        """Read a checkpoint's files, if it has any. Raises CheckpointError for another pooling than
        that of the last token, and for unknown modules."""
        file = path / "modules.json"
        named = read_json(path / "config_sentence_transformers.json")
        try:
            modules = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
            kinds = {str(each.get("type")).rpartition(".")[2]: each.get("path") for each in modules}
            prompts = {name: str(text) for name, text in (named.get("prompts") or {}).items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError("modules.json or its prompts are of no known form") from error
        if not kinds:
            return None
        pooling = read_json(path / str(kinds.get("Pooling")) / "config.json").items()
        modes = {f"{name}_{on}" for name, on in pooling if name.startswith("pooling_mode") and on}
        wanted = kinds.keys() | {mode.removesuffix("_True") for mode in modes or {"no pooling"}}
        for name in sorted(wanted - _KNOWN):
            raise CheckpointError(f"modules.json asks for {name}, which is not supported")
        return cls(prompts, named.get("default_prompt_name"), "Normalize" in kinds)

    def prompt(self, name: str | None) -> str:
        """Return the text before an input; documents need none. Raises InvalidRequestError."""
        name = self.usual if name is None else name.removeprefix("search_")
        if name not in (None, "document", "passage", *self.prompts):
            raise InvalidRequestError(f"the model has no prompt {name!r}, only {[*self.prompts]}")
        return self.prompts.get(name or "", "")


def template_of(tokenizer: Tokenizer) -> str:
    """Return the template of bare texts, with the tokens that the tokenizer adds to them."""
    whole, bare = (tokenizer.backend.encode("a", None, False, on).tokens for on in (True, False))
    before, _, behind = "".join(whole).partition("".join(bare))
    return f"{before}{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}{behind}"
