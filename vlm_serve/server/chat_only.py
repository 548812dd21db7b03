"""Fields of chat in the other forms of a chat request.

What such a form does not declare itself would change the answer if it came as a chat field, so it
is refused there, not ignored.
"""

from __future__ import annotations

from typing import Any

from vlm_serve.server.protocol import ChatCompletionRequest

# Field -> values that ask for nothing, as in `fields.UNIMPLEMENTED`.
CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    name: () for name in ChatCompletionRequest.model_fields if name != "stream_options"
} | {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "return_token_ids": (False,),
    "return_routed_experts": (False,),
    "stop": ([],),
    "stop_token_ids": ([],),
}
