"""Parts of a conversation's prompt, so that a later one can be told where it parts from it.

Clients compare requests, not tokens: the model, the tools, the system prompt, the messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from blake3 import blake3

from vlm_serve.preprocess.identity.affinity import front_of, turn_digests
from vlm_serve.preprocess.reading.conversation import Conversation

DIGEST_BYTES = 16
_IN_ORDER = ("model", "tools", "system", "options")


@dataclass(frozen=True, slots=True)
class PromptParts:
    """Digests of the parts of a prompt.

    Attributes:
        model: which weights compute it.
        tools, options: the functions, and the variables of the template and options of media that
            change what follows.
        settings: settings of the request that decide options, by name.
        system: its system messages at the start.
        turns: the conversation up to the end of each message; of a prompt that is only compared
            with later ones the last.
        length: number of messages.
    """

    model: str
    tools: bytes
    options: bytes
    settings: tuple[tuple[str, bytes], ...]
    system: bytes
    turns: tuple[bytes, ...]
    length: int

    @classmethod
    def of(cls, conversation: Conversation, model: str, **settings: str | None) -> PromptParts:
        """Return the parts of a conversation's prompt. It takes time in proportion to its texts."""
        front, turns = front_of(conversation), tuple(turn_digests(conversation))
        roles = [message["role"] for message in conversation.messages]
        first = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
        tools, options = (_digest(front.get(name)) for name in ("tools", "options"))
        given = tuple((name, _digest(value)) for name, value in settings.items())
        system = turns[first - 1] if first else b""
        return cls(model, tools, options, given, system, turns, len(turns))

    def kept(self) -> PromptParts:
        """Return what is needed for comparing later prompts with this one."""
        return replace(self, turns=self.turns[-1:])

    def change(self, now: PromptParts) -> str:
        """Return the first part in which a later prompt differs from this one: "model", "tools",
        "system", the name of a setting, "options" or "messages". Return "" if it begins with it."""
        for part in _IN_ORDER:
            if getattr(self, part) == getattr(now, part):
                continue
            if part != "options":
                return part
            changed = set(now.settings) - set(self.settings)
            return next((name for name, value in now.settings if (name, value) in changed), part)
        kept = now.turns[self.length - 1 : self.length] if self.length else ()
        return "" if kept == self.turns[-1:] else "messages"


def _digest(text: str | None) -> bytes:
    return blake3((text or "").encode("utf-8", "surrogatepass")).digest(DIGEST_BYTES)
