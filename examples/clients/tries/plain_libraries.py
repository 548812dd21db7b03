"""Libraries that ask a model in plain texts: a picture, a stream, a tool call."""

from __future__ import annotations

import asyncio
import json

from common import (
    ASK_PARIS,
    CLIENT,
    KEY,
    MODEL,
    PICTURE,
    PICTURE_PARTS,
    ROOT_URL,
    SAY,
    SEE,
    TOOL,
    URL,
    holds,
    step,
    weather,
)


def aisuite() -> None:
    import aisuite

    client = aisuite.Client({"openai": {"api_key": KEY, "base_url": URL}})
    with step("a question"):
        made = client.chat.completions.create(
            model=f"openai:{MODEL}", messages=[{"role": "user", "content": SAY}]
        )
        holds(made.choices[0].message.content, "hello to you")


def chatlas() -> None:
    from chatlas import ChatAnthropic, ChatOpenAICompletions, content_image_file

    chat = ChatOpenAICompletions(base_url=URL, api_key=KEY, model=MODEL)
    with step("a picture"):
        holds(chat.chat(SEE, content_image_file(str(PICTURE)), echo="none"), "heart")
    with step("a tool, two turns"):
        chat.register_tool(weather)
        holds(chat.chat(ASK_PARIS, echo="none"), "There is rain in Paris.")
        holds(chat.chat("Call weather for Rome", echo="none"), "There is sun in Rome.")
    with step("messages"):
        claude = ChatAnthropic(model=MODEL, api_key=KEY, kwargs={"base_url": ROOT_URL})
        holds(claude.chat(SAY, echo="none"), "hello to you")


def any_llm() -> None:
    from any_llm import completion

    with step("a tool call"):
        made = completion(
            model=MODEL,
            provider="openai",
            api_base=URL,
            api_key=KEY,
            messages=[{"role": "user", "content": ASK_PARIS}],
            tools=[TOOL],
        )
        (call,) = made.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}


def huggingface_hub() -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=URL, api_key=KEY)
    with step("a picture"):
        made = client.chat_completion(
            model=MODEL, messages=[{"role": "user", "content": PICTURE_PARTS}]
        )
        holds(made.choices[0].message.content, "heart")
    with step("a stream"):
        chunks = client.chat_completion(
            model=MODEL, messages=[{"role": "user", "content": SAY}], stream=True
        )
        pieces = [each.choices[0].delta.content or "" for each in chunks if each.choices]
        holds("".join(pieces), "hello to you")
    with step("a tool call"):
        made = client.chat_completion(
            model=MODEL, messages=[{"role": "user", "content": ASK_PARIS}], tools=[TOOL]
        )
        (call,) = made.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}


def mirascope() -> None:
    from mirascope import llm

    llm.register_provider("openai", base_url=URL, api_key=KEY)
    with step("a question"):
        holds(llm.model(f"openai/{MODEL}").call(SAY).text(), "hello to you")


def guidance() -> None:
    import guidance

    with step("a turn"):
        model = guidance.models.OpenAI(MODEL, base_url=URL, api_key=KEY, echo=False)
        with guidance.user():
            model += SAY
        with guidance.assistant():
            model += guidance.gen("answer", max_tokens=20)
        holds(model["answer"], "hello to you")


def ell() -> None:
    import ell
    import openai

    client = openai.Client(base_url=URL, api_key=KEY)

    @ell.simple(model=MODEL, client=client)
    def greet() -> str:
        return SAY

    with step("a question"):
        holds(greet(), "hello to you")


def gradio() -> None:
    import gradio
    from gradio_client import Client, handle_file

    demo = gradio.load_chat(URL, model=MODEL, token=KEY, file_types=["image"])
    _, local, _ = demo.launch(prevent_thread_lock=True, quiet=True)

    def ask(text: str, *files: object) -> object:
        message = {"text": text, "files": list(files)}
        return Client(local, verbose=False).predict(message, api_name="/open_api_stream")

    with step("load_chat answers"):
        holds(ask(SAY), "hello to you")
    with step("a picture"):
        holds(ask(SEE, handle_file(str(PICTURE))), "heart")
    demo.close()


def inspect_ai() -> None:
    from inspect_ai.model import get_model
    from inspect_ai.tool import tool

    @tool
    def lookup():
        async def weather(city: str) -> str:
            """Return the weather.

            Args:
                city: the city
            """
            return f"rain in {city}"

        return weather

    model = get_model(f"openai-api/here/{MODEL}", base_url=URL, api_key=KEY)
    with step("a question"):
        holds(asyncio.run(model.generate(SAY)).completion, "hello to you")
    with step("a tool call"):
        made = asyncio.run(model.generate("Call lookup for Paris", tools=[lookup()]))
        assert made.message.tool_calls[0].arguments == {"city": "Paris"}


globals()[CLIENT.replace("-", "_")]()
