"""Tools that evaluate and measure: the server answers, scores prompts, or judges."""

from __future__ import annotations

import json
import os
from pathlib import Path

from common import CLIENT, KEY, MODEL, ROOT_URL, URL, holds, ran, step

TOKENIZER = os.environ["TOKENIZER"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def lm_eval() -> None:
    rows = [{"question": f"Say {word}.", "answer": f"{word} to you"} for word in ("hello", "again")]
    Path("rows.json").write_text(json.dumps(rows))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "rows.json"}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    scored = {"task": "scored", "output_type": "multiple_choice", **data}
    scored |= {"doc_to_choice": ["{{answer}}", "a house"], "doc_to_target": 0}
    Path("scored.yaml").write_text(json.dumps(scored | {"metric_list": [{"metric": "acc"}]}))
    answered = {"task": "answered", "output_type": "generate_until", **data}
    answered |= {"doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}]}
    answered |= {"generation_kwargs": {"until": ["</s>"], "max_gen_toks": 32}}
    Path("answered.yaml").write_text(json.dumps(answered))
    shared = f"model={MODEL},num_concurrent=1,max_length=8192"
    start = ("lm_eval", "run", "--include_path", ".")
    with step("scores continuations of completions"):
        options = f"{shared},base_url={URL}/completions,tokenizer={TOKENIZER}"
        command = ("--model", "local-completions", "--tasks", "scored", "--model_args", options)
        holds(ran(*start, *command, **OFFLINE), "|acc ")
    with step("compares answers of chat"):
        options = f"{shared},base_url={URL}/chat/completions"
        command = ("--model", "local-chat-completions", "--apply_chat_template")
        command += ("--tasks", "answered", "--model_args", options)
        text = ran(*start, *command, OPENAI_API_KEY=KEY, **OFFLINE)
        (row,) = [line for line in text.splitlines() if "|exact_match|" in line.replace(" ", "")]
        holds(row.replace(" ", ""), "|1|")


def deepeval() -> None:
    os.environ |= {"DEEPEVAL_TELEMETRY_OPT_OUT": "YES", "DEEPEVAL_PER_TASK_TIMEOUT_SECONDS": "200"}
    from deepeval.metrics import GEval
    from deepeval.models import LocalModel
    from deepeval.test_case import LLMTestCase, SingleTurnParams

    model = LocalModel(model=MODEL, base_url=URL, api_key=KEY)
    with step("a judge gives a score"):
        metric = GEval(
            name="right",
            evaluation_steps=["JUDGE the answer."],
            evaluation_params=[SingleTurnParams.ACTUAL_OUTPUT],
            model=model,
            async_mode=False,
        )
        metric.measure(LLMTestCase(input="What?", actual_output="Rain."), _show_indicator=False)
        assert metric.score == 0.8, metric.score


def ragas() -> None:
    import openai
    from ragas.llms import llm_factory
    from ragas.metrics import DiscreteMetric

    os.environ["RAGAS_DO_NOT_TRACK"] = "true"
    model = llm_factory(MODEL, client=openai.OpenAI(base_url=URL, api_key=KEY))
    with step("a judge chooses a value"):
        metric = DiscreteMetric(
            name="right", allowed_values=["pass", "fail"], prompt="RAGAS judges {response}"
        )
        assert metric.score(llm=model, response="rain").value == "pass"


def guidellm() -> None:
    options = {
        "backend": f"kind=openai_http,target={ROOT_URL},model={MODEL}",
        "profile": "kind=synchronous",
        "constraint": "kind=max_requests,count=3",
        "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
        "data": "kind=synthetic_text,prompt_tokens=64,output_tokens=8",
        "output": "kind=json,path=made.json",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    with step("measures streams"):
        ran("guidellm", "run", *words, **OFFLINE)
        (made,) = json.loads(Path("made.json").read_text())["benchmarks"]
        assert len(made["requests"]["successful"]) == 3, made["requests"]


globals()[CLIENT.replace("-", "_")]()
