"""A machine without a GPU needs no Triton: the demo answers in forms and calls tools without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
for name in ("triton", "xgrammar"):
    sys.modules[name] = None  # as if it were not installed
from serving import running
from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

config = EngineConfig(device="cpu", block_size=16, cache_memory="48MiB", max_model_len=1024)
schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
json_schema = {"name": "x", "schema": schema}
engine = Engine.from_checkpoint("demo", config)
with running(engine, ServerConfig(port=0, idle_check=False)) as server:
    def ask(**fields):
        answer = server.chat("What is it?", max_tokens=60, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    assert ask()["content"]
    form = {"type": "json_schema", "json_schema": json_schema}
    assert json.loads(ask(response_format=form)["content"])["a"] in (1, 2)
    assert ask(structured_outputs={"choice": ["yes"]})["content"] == "yes"
    assert ask(structured_outputs={"regex": "a{3}"})["content"] == "aaa"
    grammar = 'root ::= "(" root? ")"'
    assert ask(structured_outputs={"grammar": grammar}, seed=1)["content"].startswith("(")
    (call,) = ask(tools=[tool], tool_choice="required", parallel_tool_calls=False)["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
assert sys.modules["triton"] is None
"""


def test_forms_and_calls_without_triton() -> None:
    here = Path(__file__).parents[1]
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
