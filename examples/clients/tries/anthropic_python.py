"""Anthropic's Python client: a picture, a stream, a tool over two turns, counted tokens."""

import anthropic
from common import ASK_PARIS, DATA, KEY, MODEL, ROOT_URL, SAY, SEE, holds, step, weather

api = anthropic.Anthropic(
    base_url=ROOT_URL, api_key=KEY, max_retries=0, _strict_response_validation=True
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "The weather of a city", "input_schema": SCHEMA}]
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}

with step("a picture"):
    content = [{"type": "image", "source": SOURCE}, {"type": "text", "text": SEE}]
    made = api.messages.create(
        model=MODEL, max_tokens=64, messages=[{"role": "user", "content": content}]
    )
    holds(made.content[0].text, "heart")
with (
    step("a stream"),
    api.messages.stream(
        model=MODEL, max_tokens=64, messages=[{"role": "user", "content": SAY}]
    ) as stream,
):
    holds("".join(stream.text_stream), "hello to you")
with step("a tool"):
    messages = [{"role": "user", "content": ASK_PARIS}]
    made = api.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=TOOLS)
    call = next(each for each in made.content if each.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
    messages.append({"role": "assistant", "content": made.content})
    messages.append({"role": "user", "content": [result]})
    made = api.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=TOOLS)
    holds(made.content[0].text, "There is rain in Paris.")
with step("counted tokens"):
    assert api.messages.count_tokens(model=MODEL, messages=messages, tools=TOOLS).input_tokens > 50
