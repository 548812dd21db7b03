"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.keys import KeyScope
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.turns import fit_systems
from vlm_serve.server.api.shared.chat_request import PromptOrMessages
from vlm_serve.server.api.shared.conversation import prepare
from vlm_serve.server.api.shared.fields import Optional, RequestModel
from vlm_serve.server.api.shared.fields import Tokens as TokenIds
from vlm_serve.server.api.shared.logprobs import token_text
from vlm_serve.server.api.shared.request_body import read_prompt, read_request
from vlm_serve.server.api.shared.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.http.auth import salt_of
from vlm_serve.server.http.tenants import tenant_of
from vlm_serve.server.service import Service


class TokenizeRequest(PromptOrMessages):
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: TokenIds


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Optional[list[str]] = None


class Detokenized(BaseModel):
    prompt: str


async def tokenize(service: Service, request: Request) -> Response:
    """Return the token ids of a text, or of a conversation as the model sees it.

    Placeholders of media are expanded.

    Raises:
        InvalidRequestError: the request is invalid.
    """
    scope = KeyScope(salt_of(request.scope, None))
    chat, answer = await read_prompt(
        service, request, "chat", TokenizeRequest, partial(_tokenizing, service, scope)
    )
    with service.admission.admitted(tenant_of(request.scope)):
        if chat is None:
            return await service.workers.prepare(answer)
        prompt = await service.prepare(partial(prepare, service, chat, scope))
        return await service.workers.prepare(partial(answer, prompt))


def _tokenizing(
    service: Service, scope: KeyScope, body: TokenizeRequest, conversation: Conversation
) -> tuple[Conversation | None, Callable[..., Response]]:
    """Return the conversation, if there is one, and a function from its prompt to the response."""
    ignored = ignored_fields(body.model_extra or {})
    conversation = fit_systems(
        conversation, anywhere=service.engine.preprocessor.template_traits.late_systems
    )
    headers = ignored_header(ignored, conversation.ignored)
    service.state.resolve_model(body.model)
    body.check_alternatives(body.prompt)

    def answer(prompt: Prompt | None = None) -> Response:
        if prompt is None:
            salt = scope.cache_salt
            ids = service.engine.preprocessor.encode(body.prompt or "", cache_salt=salt)
        else:
            ids = list(prompt.token_ids)
        texts = None
        if body.return_token_strs:
            texts = [token_text(service.tokenizer, token) for token in ids]
        tokens = Tokens(
            count=len(ids),
            max_model_len=service.engine.max_model_len,
            tokens=ids,
            token_strs=texts,
        )
        return JSONResponse(tokens.model_dump(), headers=headers)

    return (None if body.messages is None else conversation), answer


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids, special tokens included.

    Raises:
        InvalidRequestError: the request is invalid.
    """
    work = await read_request(service, request, DetokenizeRequest, partial(_detokenizing, service))
    return await service.workers.prepare(work)


def _detokenizing(service: Service, body: DetokenizeRequest) -> Callable[[], Response]:
    headers = ignored_header(ignored_fields(body.model_extra or {}))
    service.state.resolve_model(body.model)
    size = service.tokenizer.vocab_size
    bad = next((token for token in body.tokens if not 0 <= token < size), None)
    if bad is not None:
        raise InvalidRequestError(
            f"token {bad} is outside the vocabulary of {size}", param="tokens"
        )

    def work() -> Response:
        text = service.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return JSONResponse(Detokenized(prompt=text).model_dump(), headers=headers)

    return work
