"""The model `vlm_serve` of lmms-eval: a pipeline in lmms-eval's own process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from lmms_eval.api.instance import GenerationResult, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.protocol import ChatMessages

from vlm_serve.commands.config_file import DEMO_MODEL, read_config_file
from vlm_serve.errors import VlmServeError
from vlm_serve.eval.lmms_samples import FAILED
from vlm_serve.eval.replies import Reply, tokens_of, turn_answer_of
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import options_of
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

_SAMPLING = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")


class VlmServe(lmms):
    """Answers the messages of each task's `doc_to_messages`, one request after the other.

    Args, from `--model_args`:
        model: as for `vlm-serve serve`.
        config: YAML file of engine options, as for `vlm-serve serve --config`; it may also name
            the model.
        max_frames_num: frames per video.
        log: JSON lines file for the replies, with tokens and finish reason.
    """

    is_simple = False

    def __init__(
        self,
        model: str | None = None,
        config: str | None = None,
        max_frames_num: int = 8,
        log: str | None = None,
        batch_size: int | str = 1,
    ) -> None:
        super().__init__()
        file = read_config_file(config)
        names = {option.name for option in options_of(EngineConfig)}
        options = {name: value for name, value in file.items() if name in names}
        self._frames = {"video": {"num_frames": max_frames_num}}
        self._log = Path(log) if log is not None else None
        self._pipe = Pipeline(
            model or file.get("model", DEMO_MODEL),
            EngineConfig(**options),
            reasoning_parser=file.get("reasoning_parser", "auto"),
        )

    def generate_until(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each request; failures are marked as lmms-eval's own clients mark them."""
        return [self._answer(*request.args[1:]) for request in requests]

    def _answer(
        self, doc_to_messages: Any, sampling: Mapping[str, Any], doc_id: int, task: str, split: str
    ) -> Any:
        item = f"{task}/{doc_id}"
        conversation = ChatMessages(messages=doc_to_messages(self.task_dict[task][split][doc_id]))
        try:
            output = self._pipe.chat(
                _messages(conversation), _params(sampling), media_io_kwargs=self._frames
            )
        except VlmServeError as error:
            self._note(Reply(item, error=error.message))
            return GenerationResult(text=f"{FAILED}] {error.message}", token_counts=TokenCounts())
        self._note(Reply(item, (turn_answer_of(output),), tokens=tokens_of([output])))
        usage = output.usage
        counts = TokenCounts(
            input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens
        )
        return GenerationResult(text=output.text, token_counts=counts)

    def _note(self, reply: Reply) -> None:
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(reply)) + "\n")

    def loglikelihood(self, requests: Sequence[Any]) -> NoReturn:
        raise NotImplementedError("vlm_serve answers tasks of the kind generate_until")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> NoReturn:
        raise NotImplementedError("vlm_serve answers tasks of the kind generate_until")


def _messages(conversation: Any) -> list[dict[str, Any]]:
    """Convert lmms-eval's messages to the pipeline's form."""
    return [
        {"role": message.role, "content": [_part(part) for part in message.content]}
        for message in conversation.messages
    ]


def _part(part: Any) -> dict[str, Any]:
    if part.type == "text":
        return {"type": "text", "text": part.text}
    if part.type not in ("image", "video"):
        raise NotImplementedError(f"vlm_serve takes no {part.type}")
    return {"type": part.type, part.type: part.url}


def _params(sampling: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling options that lmms-eval's OpenAI client would send."""
    given = {name: sampling[name] for name in _SAMPLING if sampling.get(name) is not None}
    given.setdefault("temperature", 0.0)
    return SamplingParams(max_tokens=int(sampling.get("max_new_tokens", 1024)), **given)
