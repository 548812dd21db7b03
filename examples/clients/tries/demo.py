"""Clients in their default modes, asking the built-in demo model itself: no answer is scripted.

A step fails if the server refuses, or if an answer has another form than the one asked for. A wrong
value is the model's.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

from common import (
    CLIENT,
    DATA_URL,
    KEY,
    MODEL,
    PICTURE,
    URL,
    holds,
    step,
    weather,
)
from pydantic import BaseModel

FORM = "Describe the picture."
ASK = "What is the weather in Paris?"
PARTS = [
    {"type": "text", "text": FORM},
    {"type": "image_url", "image_url": {"url": DATA_URL}},
]


class Shape(BaseModel):
    """A shape of a picture."""

    shape: str
    color: str


class Person(BaseModel):
    """A person of a text."""

    name: str
    age: int


PERSON = "Jason is 25 years old."


def is_heart(made: object) -> None:
    """A form that must be one, and is right about the picture if the model is good."""
    if not isinstance(made, Shape):
        raise TypeError(f"no form: {made!r}")
    assert (made.shape, made.color) == ("heart", "yellow"), made


def is_person(made: object) -> None:
    """As `is_heart`, about a text."""
    if not isinstance(made, Person):
        raise TypeError(f"no form: {made!r}")
    assert (made.name, made.age) == ("Jason", 25), made


def instructor() -> None:
    import instructor
    import openai

    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY))
    with step("a form of a text", of_model=True):
        messages = [{"role": "user", "content": PERSON}]
        is_person(client.create(model=MODEL, messages=messages, response_model=Person))
    with step("a form of a picture", of_model=True):
        messages = [{"role": "user", "content": PARTS}]
        is_heart(client.create(model=MODEL, messages=messages, response_model=Shape))
    with step("forms in a list", of_model=True):
        messages = [{"role": "user", "content": PERSON}]
        made = client.create_iterable(model=MODEL, messages=messages, response_model=Person)
        assert list(made) == [Person(name="Jason", age=25)], "not this list"


def llama_index() -> None:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    places = {"api_base": URL, "api_key": KEY, "is_chat_model": True, "context_window": 32768}
    model = OpenAILike(model=MODEL, is_function_calling_model=True, **places)
    with step("structured_predict of a text", of_model=True):
        is_person(model.structured_predict(Person, PromptTemplate(PERSON)))
    with step("structured_predict of a picture", of_model=True):
        blocks = [TextBlock(text=FORM), ImageBlock(path=PICTURE)]
        prompt = ChatPromptTemplate([ChatMessage(role="user", blocks=blocks)])
        is_heart(model.structured_predict(Shape, prompt))
    with step("a tool", of_model=True):
        made = model.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=ASK)
        calls = model.get_tool_calls_from_response(made, error_on_no_tool_call=False)
        assert [each.tool_kwargs for each in calls] == [{"city": "Paris"}], made


def pydantic_ai() -> None:
    from pydantic_ai import Agent, BinaryContent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=URL, api_key=KEY)
    data = BinaryContent(data=PICTURE.read_bytes(), media_type="image/png")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider)
        with step(f"{kind.__name__}: a form of a text", of_model=True):
            is_person(Agent(model, output_type=Person).run_sync(PERSON).output)
        with step(f"{kind.__name__}: a form of a picture", of_model=True):
            is_heart(Agent(model, output_type=Shape).run_sync([FORM, data]).output)
        with step(f"{kind.__name__}: a tool", of_model=True):
            holds(Agent(model, tools=[weather]).run_sync(ASK).output, "rain in Paris")


def openai_agents() -> None:
    from agents import (
        Agent,
        AsyncOpenAI,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    api = AsyncOpenAI(base_url=URL, api_key=KEY)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model=MODEL, openai_client=api)
        with step(f"{kind.__name__}: a form", of_model=True):
            agent = Agent("a", instructions="Be brief.", model=model, output_type=Person)
            is_person(Runner.run_sync(agent, PERSON).final_output)
        with step(f"{kind.__name__}: a tool", of_model=True):
            tools = [function_tool(weather)]
            agent = Agent("a", instructions="Be brief.", model=model, tools=tools)
            holds(Runner.run_sync(agent, ASK).final_output, "rain in Paris")


def langchain() -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, max_retries=0)
    picture = [{"role": "user", "content": PARTS}]
    for name, options in (
        ("structured output", {}),
        ("function calling", {"method": "function_calling"}),
    ):
        with step(f"{name}: a form of a text", of_model=True):
            is_person(model.with_structured_output(Person, **options).invoke(PERSON))
        with step(f"{name}: a form of a picture", of_model=True):
            is_heart(model.with_structured_output(Shape, **options).invoke(picture))
    with step("a bound tool", of_model=True):
        calls = model.bind_tools([weather]).invoke(ASK).tool_calls
        assert [each["args"] for each in calls] == [{"city": "Paris"}], calls
    with step("an agent with a tool", of_model=True):
        made = create_agent(model, [weather]).invoke({"messages": [("user", ASK)]})
        holds(made["messages"][-1].text, "rain in Paris")


def smolagents() -> None:
    from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
    from smolagents.utils import AgentGenerationError

    model = OpenAIServerModel(MODEL, api_base=URL, api_key=KEY, max_tokens=200)

    def run(agent: CodeAgent | ToolCallingAgent) -> object:
        """Run it; an error of a request is the server's, one of the answer's text the model's."""
        try:
            return agent.run(ASK)
        except AgentGenerationError as error:
            raise RuntimeError(error) from error

    with step("CodeAgent's own instructions are answered"):
        run(CodeAgent([tool(weather)], model, max_steps=2, verbosity_level=0))
    with step("CodeAgent with structured outputs is answered in its form"):
        agent = CodeAgent(
            [tool(weather)],
            model,
            max_steps=1,
            verbosity_level=0,
            use_structured_outputs_internally=True,
        )
        run(agent)
        told = [each.model_output for each in agent.memory.steps if hasattr(each, "model_output")]
        assert json.loads(told[0]).keys() == {"thought", "code"}, told
    with step("ToolCallingAgent calls a tool", of_model=True):
        agent = ToolCallingAgent([tool(weather)], model, max_steps=2, verbosity_level=0)
        run(agent)
        holds([str(each) for each in agent.memory.steps], "rain in Paris")


def opencode() -> None:
    models = {MODEL: {"limit": {"context": 32768, "output": 2048}}}
    options = {"baseURL": URL, "apiKey": KEY}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    settings = {"provider": {"vlm": provider}, "autoupdate": False}
    Path("opencode.json").write_text(json.dumps(settings))
    for number, more in enumerate(([], ["--continue"])):
        with step(f"turn {number + 1} is answered"):
            begin = time.monotonic()
            ran = subprocess.run(
                ["opencode", "run", "--format", "json", "-m", f"vlm/{MODEL}", *more, "Hello"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=430,
            )
            print(ran.stdout[-3000:], f"{time.monotonic() - begin:.0f} s")
            assert ran.returncode == 0, ran.stdout[-800:]


globals()[CLIENT.replace("-", "_")]()
