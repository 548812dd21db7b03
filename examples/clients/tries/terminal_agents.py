"""Agents in a terminal: two turns, each with a command that writes a file."""

from __future__ import annotations

import json
from pathlib import Path

from common import CLIENT, KEY, MODEL, ROOT_URL, URL, holds, ran, step

WORDS = ("one", "two")
LIMITS = {"context": 131072, "output": 2048}


def turns(name: str, command: list[str], going_on: list[str], ask: str, **settings: str) -> None:
    """Ask for a file in each turn; `ask` is the word of script.json that calls the agent's tool."""
    for word in WORDS:
        with step(f"{name}writes {word}"):
            more = going_on if word != WORDS[0] else []
            said = ran(*command, *more, f"{ask} WRITE {word}", **settings)
            holds(said, f"The tool says {word}")
            holds(Path(f"{word}.txt").read_text(), word)
            Path(f"{word}.txt").unlink()


def copilot() -> None:
    settings = {
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_BASE_URL": URL,
        "COPILOT_PROVIDER_API_KEY": KEY,
        "COPILOT_MODEL": MODEL,
        "COPILOT_OFFLINE": "true",
    }
    turns("", ["copilot", "--allow-all-tools", "--no-color"], ["--continue"], "-p=BASH", **settings)


def pi() -> None:
    folder = Path.home() / ".pi" / "agent"
    folder.mkdir(parents=True)
    kinds = {
        "completions": ("openai-completions", URL),
        "responses": ("openai-responses", URL),
        "messages": ("anthropic-messages", ROOT_URL),
    }
    known = {"id": MODEL, "contextWindow": 65536, "maxTokens": 2048, "input": ["text", "image"]}
    providers = {
        name: {"baseUrl": url, "api": api, "apiKey": KEY, "models": [known]}
        for name, (api, url) in kinds.items()
    }
    (folder / "models.json").write_text(json.dumps({"providers": providers}))
    for name in kinds:
        command = ["pi", "--provider", name, "--model", MODEL]
        turns(f"{name}: ", command, ["--continue"], "BASH")


def kilo() -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": URL, "apiKey": KEY},
        "models": {MODEL: {"limit": LIMITS}},
    }
    settings = {"provider": {"vlm": provider}, "permission": {"bash": "allow"}}
    folder = Path.home() / ".config" / "kilo"
    folder.mkdir(parents=True)
    for place in (Path("kilo.json"), folder / "kilo.json", Path("opencode.json")):
        place.write_text(json.dumps(settings | {"autoupdate": False}))
    turns("", ["kilo", "run", "-m", f"vlm/{MODEL}"], ["--continue"], "OPENCODE")


def cline() -> None:
    kind = "openai-compatible"
    server = ("--provider", kind, "--apikey", KEY, "--modelid", MODEL, "--baseurl", URL)
    ran("cline", "auth", *server)
    # Each word is a session of its own; the second turn of one is the tool's result.
    turns("", ["cline", "-P", kind, "-m", MODEL, "-t", "130"], [], "CLINE")


def continue_cn() -> None:
    models = [{"name": "vlm", "provider": "openai", "model": MODEL, "apiBase": URL, "apiKey": KEY}]
    models[0]["roles"] = ["chat"]  # type: ignore[assignment]
    body = {"name": "try", "version": "0.0.1", "schema": "v1", "models": models}
    Path("config.yaml").write_text(json.dumps(body))
    command = ["cn", "--config", "config.yaml", "--auto", "-p"]
    turns("", command, ["--resume"], "CLAUDE")


def vibe() -> None:
    folder = Path.home() / ".vibe"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f"""active_model = "{MODEL}"
enable_telemetry = false
enable_update_checks = false
[[providers]]
name = "vlm"
api_base = "{URL}"
api_key_env_var = "OPENAI_API_KEY"
api_style = "openai"
backend = "generic"
[[models]]
name = "{MODEL}"
provider = "vlm"
alias = "{MODEL}"
"""
    )
    command = ["vibe", "--auto-approve", "--trust"]
    settings = {"MISTRAL_API_KEY": KEY, "VIBE_HOME": str(folder)}
    turns("", command, ["--continue"], "--prompt=VIBE", **settings)


globals()[CLIENT.replace("-", "_")]()
