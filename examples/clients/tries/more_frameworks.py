"""Further frameworks of agents: a tool over two turns, a picture, answers behind rails."""

from __future__ import annotations

import asyncio

from common import (
    ASK_PARIS,
    ASK_ROME,
    CLIENT,
    KEY,
    MODEL,
    PICTURE,
    SAY,
    SEE,
    URL,
    holds,
    step,
    weather,
)

RAIN, SUN = "There is rain in Paris.", "There is sun in Rome."


def ag2() -> None:
    from ag2 import Agent, ImageInput
    from ag2.config import OpenAIConfig, OpenAIResponsesConfig

    async def talk(agent: Agent) -> list[str | None]:
        first = await agent.ask(ASK_PARIS)
        second = await first.ask(ASK_ROME)
        return [first.body, second.body]

    for kind in (OpenAIConfig, OpenAIResponsesConfig):
        config = kind(MODEL, api_key=KEY, base_url=URL)
        with step(f"{kind.__name__}: a tool, two turns"):
            made = asyncio.run(talk(Agent("a", "Be brief.", config=config, tools=[weather])))
            assert made == [RAIN, SUN], made
        with step(f"{kind.__name__}: a picture"):
            seen = Agent("a", config=config).ask(SEE, ImageInput(path=PICTURE))
            holds(asyncio.run(seen).body, "heart")


def agentscope() -> None:
    from agentscope.agent import Agent
    from agentscope.credential import OpenAICredential
    from agentscope.message import UserMsg
    from agentscope.model import OpenAIChatModel

    model = OpenAIChatModel(OpenAICredential(api_key=KEY, base_url=URL), MODEL)
    with step("an agent answers by a stream"):
        made = asyncio.run(Agent("a", "Be brief.", model).reply(UserMsg("user", SAY)))
        holds(made.content, "hello to you")


def agent_framework() -> None:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

    async def talk(agent: Agent) -> list[str]:
        session = agent.create_session()
        questions = (ASK_PARIS, ASK_ROME)
        return [(await agent.run(each, session=session)).text for each in questions]

    for kind in (OpenAIChatCompletionClient, OpenAIChatClient):
        with step(f"{kind.__name__}: a tool, two turns"):
            client = kind(MODEL, api_key=KEY, base_url=URL)
            first, second = asyncio.run(talk(Agent(client, "Be brief.", tools=[weather])))
            holds(first, RAIN)
            holds(second, SUN)


def nemoguardrails() -> None:
    from nemoguardrails import LLMRails, RailsConfig

    settings = f"""
models:
  - type: main
    engine: openai
    model: {MODEL}
    parameters: {{base_url: "{URL}", api_key: "{KEY}"}}
"""
    with step("an answer behind rails"):
        rails = LLMRails(RailsConfig.from_content(yaml_content=settings))
        made = rails.generate(messages=[{"role": "user", "content": SAY}])
        holds(made["content"], "hello to you")


def openhands_sdk() -> None:
    from openhands.sdk import LLM, Agent, Conversation
    from openhands.sdk.conversation.response_utils import get_agent_final_response

    model = LLM(model=f"hosted_vllm/{MODEL}", base_url=URL, api_key=KEY)
    for question, answer in ((SAY, "hello to you"), ("FINISH with rain", "rain")):
        with step(f"an agent: {question}"):
            conversation = Conversation(Agent(llm=model, tools=[]), workspace=".", visualizer=None)
            conversation.send_message(question)
            conversation.run()
            holds(get_agent_final_response(conversation.state.events), answer)


globals()[CLIENT.replace("-", "_")]()
