"""The output items of a response, from the blocks of an answer."""

from __future__ import annotations

from typing import Any

from vlm_serve.server.api.output_blocks import OutputBlock
from vlm_serve.server.api.responses.custom_input import input_of

_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


def item_id(block: OutputBlock, *, custom: bool) -> str:
    """Return the id of a block's item.

    Args:
        custom: the block calls a tool that takes one text.
    """
    return ("ctc_" if custom else _PREFIXES[block.kind]) + block.token


def part_of(block: OutputBlock) -> dict[str, Any]:
    """Return the part of a block's item that holds its text."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    part = {"type": "output_text", "text": block.text, "annotations": []}
    return part | {"logprobs": list(block.logprobs)}


def item_of(block: OutputBlock, status: str, *, custom: bool) -> dict[str, Any]:
    """Return a block's item; see `item_id`."""
    item: dict[str, Any] = {"id": item_id(block, custom=custom), "status": status}
    if block.kind == "call":
        call = {"call_id": f"call_{block.token}", "name": block.name}
        if custom:
            return item | {"type": "custom_tool_call"} | call | {"input": input_of(block.text)}
        return item | {"type": "function_call"} | call | {"arguments": block.text}
    parts = [] if status == "in_progress" else [part_of(block)]
    if block.kind == "reasoning":
        return item | {"type": "reasoning", "summary": [], "content": parts}
    return item | {"type": "message", "role": "assistant", "content": parts}
