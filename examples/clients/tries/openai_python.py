"""openai-python: a picture, a stream, a tool over two turns, a form; chat and responses."""

import json

import openai
from common import ASK_PARIS, DATA_URL, FORM, KEY, MODEL, SAY, SEE, URL, holds, step, weather
from pydantic import BaseModel

api = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, _strict_response_validation=True)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "The weather of a city", "parameters": PARAMETERS}


class Weather(BaseModel):
    city: str
    rain: bool


with step("a picture"):
    seen = [{"type": "image_url", "image_url": {"url": DATA_URL}}, {"type": "text", "text": SEE}]
    made = api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": seen}])
    holds(made.choices[0].message.content, "heart")
with step("a stream"):
    chunks = api.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": SAY}], stream=True
    )
    holds("".join(each.choices[0].delta.content or "" for each in chunks), "hello to you")
with step("a tool"):
    messages = [{"role": "user", "content": ASK_PARIS}]
    tools = [{"type": "function", "function": TOOL}]
    message = api.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0]
    (call,) = message.message.tool_calls
    result = weather(**json.loads(call.function.arguments))
    messages += [message.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    made = api.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    holds(made.choices[0].message.content, "There is rain in Paris.")
with step("a form"):
    messages = [{"role": "user", "content": FORM}]
    parsed = api.chat.completions.parse(model=MODEL, messages=messages, response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(city="Paris", rain=True)
with step("responses: a tool, and previous_response_id"):
    tools = [{"type": "function", "strict": False, **TOOL}]
    first = api.responses.create(model=MODEL, input=ASK_PARIS, tools=tools)
    (call,) = [each for each in first.output if each.type == "function_call"]
    result = weather(**json.loads(call.arguments))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
    second = api.responses.create(
        model=MODEL, input=[output], tools=tools, previous_response_id=first.id
    )
    holds(second.output_text, "There is rain in Paris.")
with step("responses: a picture and a form"):
    seen = [{"type": "input_image", "image_url": DATA_URL}, {"type": "input_text", "text": SEE}]
    made = api.responses.create(model=MODEL, input=[{"role": "user", "content": seen}])
    holds(made.output_text, "heart")
    parsed = api.responses.parse(model=MODEL, input=FORM, text_format=Weather)
    assert parsed.output_parsed == Weather(city="Paris", rain=True)
