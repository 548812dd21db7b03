"""Libraries that ask a model: a picture, a stream, a tool call, a form of answer."""

from __future__ import annotations

import json

from common import (
    ASK_PARIS,
    CLIENT,
    FORM,
    KEY,
    MODEL,
    PDF,
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
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    rain: bool


PARIS = Weather(city="Paris", rain=True)


def langchain() -> None:
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, max_retries=0)
    responses = ChatOpenAI(
        base_url=URL, api_key=KEY, model=MODEL, max_retries=0, use_responses_api=True
    )
    claude = ChatAnthropic(base_url=ROOT_URL, api_key=KEY, model=MODEL, max_tokens=500)
    for name, model in (("chat", chat), ("responses", responses), ("messages", claude)):
        with step(f"{name}: a picture"):
            holds(model.invoke([{"role": "user", "content": PICTURE_PARTS}]).text, "heart")
        with step(f"{name}: a stream"):
            holds("".join(each.text for each in model.stream(SAY)), "hello to you")
        with step(f"{name}: an agent with a tool, two turns"):
            agent = create_agent(model, [weather], system_prompt="Be brief.")
            state = agent.invoke({"messages": [("user", ASK_PARIS)]})
            holds(state["messages"][-1].text, "There is rain in Paris.")
            turn = ("user", "Call weather for Rome")
            state = agent.invoke({"messages": [*state["messages"], turn]})
            holds(state["messages"][-1].text, "There is sun in Rome.")
    with step("chat: a form"):
        assert chat.with_structured_output(Weather).invoke(FORM) == PARIS


def llama_index() -> None:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL,
        api_base=URL,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        context_window=65536,
    )
    with step("a picture"):
        blocks = [TextBlock(text=SEE), ImageBlock(path=PICTURE)]
        holds(model.chat([ChatMessage(role="user", blocks=blocks)]), "heart")
    with step("a stream"):
        pieces = model.stream_chat([ChatMessage(role="user", content=SAY)])
        holds("".join(each.delta or "" for each in pieces), "hello to you")
    with step("a tool"):
        from llama_index.core.tools import FunctionTool

        made = model.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=ASK_PARIS)
        (call,) = model.get_tool_calls_from_response(made)
        assert call.tool_kwargs == {"city": "Paris"}


def litellm() -> None:
    import litellm

    options = {"api_base": URL, "api_key": KEY, "model": f"hosted_vllm/{MODEL}"}
    with step("a picture"):
        made = litellm.completion(messages=[{"role": "user", "content": PICTURE_PARTS}], **options)
        holds(made.choices[0].message.content, "heart")
    with step("a streamed tool call"):
        messages = [{"role": "user", "content": ASK_PARIS}]
        chunks = list(litellm.completion(messages=messages, tools=[TOOL], stream=True, **options))
        (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}
    with step("responses"):
        made = litellm.responses(input=SAY, model=f"openai/{MODEL}", api_base=URL, api_key=KEY)
        holds(made.output[0].content[0].text, "hello to you")
    with step("a PDF document"):
        file = {"file_data": f"data:application/pdf;base64,{PDF}"}
        parts = [{"type": "file", "file": file}, {"type": "text", "text": SAY}]
        messages = [{"role": "user", "content": parts}]
        holds(litellm.completion(messages=messages, **options).choices[0].message.content, "hello")
    with step("a prompt beyond the context is its ContextWindowExceededError"):
        try:
            litellm.completion(messages=[{"role": "user", "content": "a b " * 50000}], **options)
        except litellm.ContextWindowExceededError:
            pass
        else:
            raise AssertionError("answered")
    with step("messages"):
        made = litellm.completion(
            model=f"anthropic/{MODEL}",
            api_base=ROOT_URL,
            api_key=KEY,
            messages=[{"role": "user", "content": SAY}],
        )
        holds(made.choices[0].message.content, "hello to you")


def instructor() -> None:
    import instructor
    import openai

    for mode in ("JSON_SCHEMA", "TOOLS", "MD_JSON"):
        with step(mode):
            client = instructor.from_openai(
                openai.OpenAI(base_url=URL, api_key=KEY), mode=getattr(instructor.Mode, mode)
            )
            question = "Fill Weather for Paris" if mode == "TOOLS" else FORM
            made = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": question}],
                response_model=Weather,
                max_retries=1,
            )
            assert made.model_dump() == PARIS.model_dump()


def dspy() -> None:
    import dspy

    model = dspy.LM(f"openai/{MODEL}", api_base=URL, api_key=KEY, cache=False)
    with step("a question"):
        holds(model(SAY), "hello to you")
    with step("a picture"):
        holds(model(messages=[{"role": "user", "content": PICTURE_PARTS}]), "heart")


def llm() -> None:
    import subprocess
    from pathlib import Path

    folder = Path.home() / ".config" / "io.datasette.llm"
    folder.mkdir(parents=True)
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {MODEL}\n  api_base: {URL}\n  vision: true\n"
        "  supports_tools: true\n  supports_schema: true\n"
    )

    def ask(*words: str) -> str:
        command = ["llm", "-m", "here", "--key", KEY, *words]
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-800:]
        return ran.stdout

    with step("a stream"):
        holds(ask(SAY), "hello to you")
    with step("going on with -c"):
        holds(ask("-c", "Say again."), "again to you")
    with step("a picture"):
        holds(ask("-a", str(PICTURE), SEE), "heart")
    with step("a schema"):
        assert json.loads(ask("--schema", "city, rain bool", FORM)) == PARIS.model_dump()
    with step("a tool"):
        code = "def weather(city: str) -> str:\n    return f'rain in {city}'\n"
        holds(ask("--functions", code, ASK_PARIS), "There is rain in Paris.")


def langextract() -> None:
    import langextract
    from langextract.factory import ModelConfig

    with step("an extraction"):
        example = langextract.data.ExampleData(
            text="It rains in Paris.",
            extractions=[langextract.data.Extraction("city", "Paris")],
        )
        options = {"model_id": MODEL, "api_key": KEY, "base_url": URL}
        config = ModelConfig(MODEL, provider="OpenAILanguageModel", provider_kwargs=options)
        made = langextract.extract(
            "EXTRACT: sun in Rome",
            prompt_description="Cities",
            examples=[example],
            config=config,
            use_schema_constraints=True,
        )
        assert [each.extraction_text for each in made.extractions] == ["Rome"]


def outlines() -> None:
    import openai
    import outlines

    client = openai.OpenAI(base_url=URL, api_key=KEY)
    with step("a schema"):
        made = outlines.from_openai(client, MODEL)(FORM, Weather)
        assert Weather.model_validate_json(made) == PARIS
    with step("a choice and a pattern"):
        model = outlines.from_vllm(client, MODEL)
        assert model(SAY, outlines.regex(r"hello|bye")) in ("hello", "bye")


def magentic() -> None:
    from magentic import OpenaiChatModel, prompt

    model = OpenaiChatModel(MODEL, base_url=URL, api_key=KEY)
    with step("a question"):
        holds(prompt(SAY, model=model)(_text)(), "hello to you")


def _text() -> str:
    raise NotImplementedError


_text.__annotations__ = {"return": str}


def shell_gpt() -> None:
    import os
    import subprocess

    settings = {"API_BASE_URL": URL, "DEFAULT_MODEL": MODEL, "OPENAI_API_KEY": KEY}
    settings |= {"OPENAI_USE_FUNCTIONS": "false", "USE_LITELLM": "false"}
    with step("a chat of two turns"):
        for word in ("hello", "again"):
            command = ["sgpt", "--chat", "a", "--no-cache", f"Say {word}."]
            ran = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env={**os.environ, **settings},
            )
            holds(ran.stdout + ran.stderr[-500:], f"{word} to you")


globals()[CLIENT.replace("-", "_")]()
