"""Frameworks of agents: a question, and a tool that the framework runs itself."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path

from common import (
    ASK_PARIS,
    ASK_ROME,
    CLIENT,
    KEY,
    MODEL,
    PICTURE,
    ROOT_URL,
    SAY,
    SEE,
    URL,
    holds,
    step,
    weather,
)

RAIN, SUN = "There is rain in Paris.", "There is sun in Rome."


def pydantic_ai() -> None:
    from pydantic import BaseModel
    from pydantic_ai import Agent, BinaryContent, NativeOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    class Weather(BaseModel):
        city: str
        rain: bool

    openai = OpenAIProvider(base_url=URL, api_key=KEY)
    anthropic = AnthropicProvider(base_url=ROOT_URL, api_key=KEY)
    short = {"max_tokens": 200}
    for model in (
        OpenAIChatModel(MODEL, provider=openai, settings=short),
        OpenAIResponsesModel(MODEL, provider=openai, settings=short),
        AnthropicModel(MODEL, provider=anthropic, settings=short),
    ):
        name = type(model).__name__
        agent = Agent(model, instructions="Be brief.", system_prompt="Be kind.", tools=[weather])
        with step(f"{name}: a tool, two turns"):
            first = agent.run_sync(ASK_PARIS)
            holds(first.output, RAIN)
            holds(agent.run_sync(ASK_ROME, message_history=first.all_messages()).output, SUN)
        with step(f"{name}: a picture"):
            data = BinaryContent(data=PICTURE.read_bytes(), media_type="image/png")
            holds(agent.run_sync([SEE, data]).output, "heart")
        with step(f"{name}: a form by a tool"):
            made = Agent(model, output_type=Weather).run_sync("Fill final_result for Paris")
            assert made.output == Weather(city="Paris", rain=True)
        if not isinstance(model, AnthropicModel):
            with step(f"{name}: a form"):
                made = Agent(model, output_type=NativeOutput(Weather)).run_sync("JSON for Paris")
                assert made.output == Weather(city="Paris", rain=True)


def haystack() -> None:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage, ImageContent
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    model = OpenAIChatGenerator(api_base_url=URL, api_key=Secret.from_token(KEY), model=MODEL)
    with step("a picture"):
        parts = [SEE, ImageContent.from_file_path(PICTURE)]
        made = model.run(messages=[ChatMessage.from_user(content_parts=parts)])
        holds(made["replies"][0].text, "heart")
    with step("an agent with a tool"):
        agent = Agent(chat_generator=model, tools=[create_tool_from_function(weather)])
        holds(agent.run(messages=[ChatMessage.from_user(ASK_PARIS)])["messages"][-1].text, RAIN)


def smolagents() -> None:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=URL, api_key=KEY, max_tokens=100)
    with step("a question"):
        messages = [{"role": "user", "content": [{"type": "text", "text": SAY}]}]
        holds(model.generate(messages).content, "hello to you")
    with step("an agent calls a tool"):
        agent = ToolCallingAgent([tool(weather)], model, max_steps=2, verbosity_level=0)
        agent.run("Use weather for Paris")
        holds([str(each) for each in agent.memory.steps], "rain in Paris")


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
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        with step(f"{kind.__name__}: a tool, two turns"):
            model = kind(model=MODEL, openai_client=api)
            agent = Agent(
                "a", instructions="Be brief.", model=model, tools=[function_tool(weather)]
            )
            first = Runner.run_sync(agent, ASK_PARIS)
            holds(first.final_output, RAIN)
            turn = {"role": "user", "content": ASK_ROME}
            holds(Runner.run_sync(agent, [*first.to_input_list(), turn]).final_output, SUN)


def agno() -> None:
    from agno.agent import Agent
    from agno.media import Image
    from agno.models.openai.like import OpenAILike

    model = OpenAILike(id=MODEL, base_url=URL, api_key=KEY)
    with step("a tool"):
        holds(Agent(model=model, tools=[weather], telemetry=False).run(ASK_PARIS).content, RAIN)
    with step("a picture"):
        agent = Agent(model=model, telemetry=False)
        holds(agent.run(SEE, images=[Image(filepath=PICTURE)]).content, "heart")


def strands() -> None:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": URL, "api_key": KEY}, model_id=MODEL)
    with step("a tool, two turns"):
        agent = Agent(model=model, tools=[tool(weather)], callback_handler=None)
        holds(agent(ASK_PARIS), RAIN)
        holds(agent(ASK_ROME), SUN)


def autogen() -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = {
        "vision": True,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": "unknown",
    }
    client = OpenAIChatCompletionClient(model=MODEL, base_url=URL, api_key=KEY, model_info=info)
    agent = AssistantAgent("a", client, tools=[weather], reflect_on_tool_use=True, description="a")
    with step("a tool, and its result"):
        holds(asyncio.run(agent.run(task=ASK_PARIS)).messages[-1].content, RAIN)


def semantic_kernel() -> None:
    from openai import AsyncOpenAI
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion

    service = OpenAIChatCompletion(
        ai_model_id=MODEL, async_client=AsyncOpenAI(base_url=URL, api_key=KEY)
    )
    agent = ChatCompletionAgent(service=service, name="a", instructions="Be brief.")
    with step("an agent answers"):
        holds(asyncio.run(agent.get_response(messages=SAY)), "hello to you")


def google_adk() -> None:
    from google.adk.agents import Agent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner

    model = LiteLlm(model=f"hosted_vllm/{MODEL}", api_base=URL, api_key=KEY)
    agent = Agent(name="a", model=model, instruction="Be brief.", tools=[weather])
    with step("a tool"):
        runner = InMemoryRunner(agent)
        events = asyncio.run(runner.run_debug(ASK_PARIS, quiet=True))
        holds(events[-1].content.parts[-1].text, RAIN)


def camel_ai() -> None:
    from camel.agents import ChatAgent
    from camel.models import ModelFactory
    from camel.types import ModelPlatformType
    from camel.utils import BaseTokenCounter

    class Counter(BaseTokenCounter):
        """Counts words: camel's own counter downloads the vocabulary of tiktoken."""

        def count_tokens_from_messages(self, messages: list[dict[str, object]]) -> int:
            return sum(len(str(each["content"]).split()) for each in messages)

        def encode(self, text: str) -> list[int]:
            raise NotImplementedError

        def decode(self, token_ids: list[int]) -> str:
            raise NotImplementedError

    model = ModelFactory.create(
        ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
        MODEL,
        url=URL,
        api_key=KEY,
        token_counter=Counter(),
    )
    with step("a tool"):
        agent = ChatAgent("Be brief.", model=model, tools=[weather])
        holds(agent.step(ASK_PARIS).msgs[0].content, RAIN)


def qwen_agent() -> None:
    from qwen_agent.llm import get_chat_model

    model = get_chat_model(
        {"model": MODEL, "model_type": "oai", "model_server": URL, "api_key": KEY}
    )
    with step("a stream"):
        *_, last = model.chat([{"role": "user", "content": SAY}])
        holds(last, "hello to you")


def crewai() -> None:
    from crewai import LLM

    with step("a question"):
        model = LLM(model=f"openai/{MODEL}", base_url=URL, api_key=KEY)
        holds(model.call(SAY), "hello to you")


def langroid() -> None:
    spec = importlib.util.find_spec("litellm")  # ships the vocabularies tiktoken would download
    tokenizers = Path(str(spec and spec.origin)).parent / "litellm_core_utils" / "tokenizers"
    os.environ["TIKTOKEN_CACHE_DIR"] = str(tokenizers)
    import langroid.language_models as models

    config = models.OpenAIGPTConfig(
        chat_model=MODEL, api_base=URL, api_key=KEY, chat_context_length=65536
    )
    with step("a question"):
        holds(models.OpenAIGPT(config).chat(SAY).message, "hello to you")


def griptape() -> None:
    from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
    from griptape.structures import Agent

    driver = OpenAiChatPromptDriver(model=MODEL, base_url=URL, api_key=KEY)
    with step("an agent answers"):
        holds(Agent(prompt_driver=driver).run(SAY).output.value, "hello to you")


globals()[CLIENT.replace("-", "_")]()
