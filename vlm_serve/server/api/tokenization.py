"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.api.bodies import Optional
from vlm_serve.server.api.fields import RequestModel
from vlm_serve.server.api.logprobs import token_text
from vlm_serve.server.api.prompts import EitherPrompt, prepared_chat
from vlm_serve.server.api.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.body import read_json
from vlm_serve.server.service import Service


class TokenizeRequest(EitherPrompt):
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[int]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Optional[list[str]] = None


class Detokenized(BaseModel):
    prompt: str


async def tokenize(service: Service, request: Request) -> Response:
    """Token ids of a text, or of a conversation as the model would see it (placeholders of media
    expanded). Raises InvalidRequestError."""
    body = await read_json(request, TokenizeRequest, service.config.max_body_bytes)
    headers = ignored_header(ignored_fields(body.model_extra or {}))
    service.resolve_model(body.model)
    chat = body.chat_or_none(body.prompt)
    with service.admitted():
        if chat is None:
            text = body.prompt or ""
            ids = await service.in_pool(lambda: service.tokenizer.encode(text))
        else:
            ids = list((await prepared_chat(service, chat)).token_ids)
    texts = [token_text(service.tokenizer, token) for token in ids]
    answer = Tokens(
        count=len(ids),
        max_model_len=service.engine.max_model_len,
        tokens=ids,
        token_strs=texts if body.return_token_strs else None,
    )
    return JSONResponse(answer.model_dump(), headers=headers)


async def detokenize(service: Service, request: Request) -> Response:
    """Text of token ids, special tokens included. Raises InvalidRequestError."""
    body = await read_json(request, DetokenizeRequest, service.config.max_body_bytes)
    headers = ignored_header(ignored_fields(body.model_extra or {}))
    service.resolve_model(body.model)
    size = service.tokenizer.vocab_size
    bad = next((token for token in body.tokens if not 0 <= token < size), None)
    if bad is not None:
        raise InvalidRequestError(
            f"token {bad} is outside the vocabulary of {size}", param="tokens"
        )
    text = await service.in_pool(
        lambda: service.tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return JSONResponse(Detokenized(prompt=text).model_dump(), headers=headers)
