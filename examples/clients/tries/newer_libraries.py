"""Libraries that came later: languages of prompts, gateways, traces, a browser's agent."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

from common import (
    ASK_PARIS,
    CLIENT,
    DATA,
    KEY,
    MODEL,
    PDF,
    PICTURE_PARTS,
    ROOT_URL,
    SAY,
    SEE,
    TOOL,
    URL,
    holds,
    step,
)

BAML = """
client<llm> Chat {
  provider openai-generic
  options {
    base_url "BASE"
    api_key "none"
    model "MODEL"
  }
}
client<llm> Responses {
  provider openai-responses
  options {
    base_url "BASE"
    api_key "none"
    model "MODEL"
  }
}
client<llm> Messages {
  provider anthropic
  options {
    base_url "ROOT"
    api_key "none"
    model "MODEL"
    max_tokens 100
  }
}
class Weather {
  city string
  rain bool
}
generator target {
  output_type "python/pydantic"
  output_dir "."
  version "0.226.3"
}
"""
FUNCTIONS = """
function SayWith{0}() -> string {{
  client {0}
  prompt #"{{{{ _.role("user") }}}} Say hello."#
}}
function SeeWith{0}(img: image) -> string {{
  client {0}
  prompt #"{{{{ _.role("user") }}}} What do you see? {{{{ img }}}}"#
}}
function ReadWith{0}(doc: pdf) -> string {{
  client {0}
  prompt #"{{{{ _.role("user") }}}} {{{{ doc }}}} Say hello."#
}}
function FormWith{0}() -> Weather {{
  client {0}
  prompt #"{{{{ _.role("user") }}}} {{{{ ctx.output_format }}}} JSON for Paris"#
}}
"""


def baml() -> None:
    folder = Path("baml_src")
    folder.mkdir()
    kinds = ("Chat", "Responses", "Messages")
    text = BAML.replace("BASE", URL).replace("ROOT", ROOT_URL).replace("MODEL", MODEL)
    (folder / "main.baml").write_text(text + "".join(map(FUNCTIONS.format, kinds)))
    subprocess.run(["baml-cli", "generate", "--from", str(folder)], check=True)
    import sys

    sys.path.insert(0, str(folder))
    import baml_py
    from baml_client.sync_client import b

    for kind in kinds:
        with step(f"{kind}: a question"):
            holds(getattr(b, f"SayWith{kind}")(), "hello to you")
        with step(f"{kind}: a picture"):
            holds(
                getattr(b, f"SeeWith{kind}")(baml_py.Image.from_base64("image/png", DATA)), "heart"
            )
        with step(f"{kind}: a PDF document"):
            holds(getattr(b, f"ReadWith{kind}")(baml_py.Pdf.from_base64(PDF)), "hello to you")
        with step(f"{kind}: a form"):
            made = getattr(b, f"FormWith{kind}")()
            assert (made.city, made.rain) == ("Paris", True), made


def portkey() -> None:
    from portkey_ai import Portkey

    client = Portkey(base_url=URL, api_key=KEY)
    with step("a picture"):
        made = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": PICTURE_PARTS}]
        )
        holds(made.choices[0].message.content, "heart")
    with step("a stream"):
        parts = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": SAY}], stream=True
        )
        said = [part.choices[0].delta.content or "" for part in parts if part.choices]
        holds("".join(said), "hello to you")
    with step("a tool, two turns"):
        turns: list[object] = [{"role": "user", "content": ASK_PARIS}]
        made = client.chat.completions.create(model=MODEL, messages=turns, tools=[TOOL])
        (call,) = made.choices[0].message.tool_calls
        function = {"name": call.function.name, "arguments": call.function.arguments}
        asked = {"id": call.id, "type": "function", "function": function}
        turns.append({"role": "assistant", "content": "I look.", "tool_calls": [asked]})
        turns.append({"role": "tool", "tool_call_id": call.id, "content": "rain in Paris"})
        made = client.chat.completions.create(model=MODEL, messages=turns, tools=[TOOL])
        holds(made.choices[0].message.content, "There is rain in Paris.")


def langfuse() -> None:
    os.environ |= {"LANGFUSE_TRACING_ENABLED": "false", "LANGFUSE_PUBLIC_KEY": "pk"}
    os.environ |= {"LANGFUSE_SECRET_KEY": "sk", "LANGFUSE_HOST": ROOT_URL}
    from langfuse.openai import OpenAI

    client = OpenAI(base_url=URL, api_key=KEY)
    turns = [{"role": "user", "content": PICTURE_PARTS}]
    with step("a picture"):
        made = client.chat.completions.create(model=MODEL, messages=turns)
        holds(made.choices[0].message.content, "heart")
    with step("a second turn as a stream"):
        turns += [{"role": "assistant", "content": made.choices[0].message.content}]
        turns += [{"role": "user", "content": SAY}]
        parts = client.chat.completions.create(model=MODEL, messages=turns, stream=True)
        said = [part.choices[0].delta.content or "" for part in parts if part.choices]
        holds("".join(said), "hello to you")


def claude_agent_sdk() -> None:
    from claude_agent_sdk import (
        AssistantMessage,
        ClaudeAgentOptions,
        ClaudeSDKClient,
        create_sdk_mcp_server,
        tool,
    )

    @tool("weather", "The weather", {"city": str})
    async def weather(arguments: dict[str, str]) -> dict[str, object]:
        return {"content": [{"type": "text", "text": f"rain in {arguments['city']}"}]}

    settings = {
        "ANTHROPIC_BASE_URL": ROOT_URL,
        "ANTHROPIC_API_KEY": KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }
    server = create_sdk_mcp_server("here", tools=[weather])
    options = ClaudeAgentOptions(
        model=MODEL,
        env=settings,
        tools=[],
        mcp_servers={"here": server},
        allowed_tools=["mcp__here__weather"],
        system_prompt="Be brief.",
    )

    async def said(client: ClaudeSDKClient, text: str) -> str:
        await client.query(text)
        answers = [message async for message in client.receive_response()]
        blocks = [
            each for one in answers if isinstance(one, AssistantMessage) for each in one.content
        ]
        return "".join(getattr(block, "text", "") for block in blocks)

    async def turns() -> None:
        async with ClaudeSDKClient(options) as client:
            with step("a tool"):
                holds(await said(client, "Call mcp__here__weather for Paris"), "rain in Paris")
            with step("a second turn"):
                holds(await said(client, SAY), "hello to you")

    asyncio.run(turns())


def browser_use() -> None:
    os.environ |= {"ANONYMIZED_TELEMETRY": "false", "BROWSER_USE_CLOUD_SYNC": "false"}
    from browser_use.llm import ChatOpenAI
    from browser_use.llm.messages import (
        ContentPartImageParam,
        ContentPartTextParam,
        ImageURL,
        UserMessage,
    )
    from common import DATA_URL
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str
        rain: bool

    model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY)
    with step("a picture"):
        parts = [
            ContentPartTextParam(text=SEE),
            ContentPartImageParam(image_url=ImageURL(url=DATA_URL)),
        ]
        holds(asyncio.run(model.ainvoke([UserMessage(content=parts)])).completion, "heart")
    with step("a form"):
        made = asyncio.run(model.ainvoke([UserMessage(content="JSON for Paris")], Weather))
        assert made.completion == Weather(city="Paris", rain=True), made


globals()[CLIENT.replace("-", "_")]()
