"""Programs that speak OpenAI's API, against `penjing serve`: LiteLLM, LangChain's client, and lm-eval's scoring.

    python benchmarks/serve_clients.py RUN

Each that is installed beside penjing is tried; the others are named. lm-eval's `local-completions` scores questions of
several choices through the server, and the same questions are scored by the model itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ASK = [{"role": "user", "content": "Tell a story about Tom and a kite."}]
NAME = "served"
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "adds numbers",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "maxLength": 8}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}
CHOICES = 4


def litellm(url: str, run: Path) -> str:
    """Chat, stream, a forced tool call, JSON by schema, text completion."""
    import litellm as client

    client.telemetry = False
    known = {"model": f"openai/{NAME}", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 60, "seed": 1}
    whole = client.completion(messages=ASK, **known)
    parts = client.completion(messages=ASK, stream=True, **known)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    called = client.completion(messages=ASK, tools=[TOOL], tool_choice="required", **known)
    (call,) = called.choices[0].message.tool_calls
    assert "expression" in json.loads(call.function.arguments)
    schema = {
        "name": "kites",
        "schema": {
            "type": "object",
            "properties": {"kites": {"type": "boolean"}},
            "required": ["kites"],
            "additionalProperties": False,
        },
    }
    formed = client.completion(messages=ASK, response_format={"type": "json_schema", "json_schema": schema}, **known)
    assert list(json.loads(formed.choices[0].message.content)) == ["kites"]
    text = client.text_completion(prompt="Once upon a time", **{**known, "model": f"text-completion-openai/{NAME}"})
    assert isinstance(text.choices[0].text, str) and text.usage.prompt_tokens > 0
    return "chat, stream, tool call, JSON by schema, text completion"


def langchain_openai(url: str, run: Path) -> str:
    """Chat, stream, async, a bound tool, log-probabilities."""
    import asyncio

    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=NAME, base_url=f"{url}/v1", api_key="none", max_tokens=60, seed=1, max_retries=0)
    said = model.invoke(ASK[0]["content"])
    assert said.content and said.usage_metadata["output_tokens"] > 0
    assert "".join(part.content for part in model.stream(ASK[0]["content"])) == said.content
    assert asyncio.run(model.ainvoke(ASK[0]["content"])).content == said.content
    called = model.bind_tools([TOOL], tool_choice="calculator").invoke(ASK[0]["content"])
    assert called.tool_calls[0]["name"] == "calculator"
    scored = model.bind(logprobs=True, top_logprobs=2).invoke(ASK[0]["content"])
    assert len(scored.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
    return "chat, stream, async, tool call, log-probabilities"


def lm_eval(url: str, run: Path) -> str:
    """Accuracy and log-probabilities of questions with four choices: through the server, and by the model itself."""
    import lm_eval as harness

    with tempfile.TemporaryDirectory() as folder:
        rows = questions(run)
        data = Path(folder) / "questions.jsonl"
        data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        tokenizer = Path(folder) / "tokenizer"
        own = own_scores(run, rows, tokenizer)
        task = {
            "task": "choices",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": str(data)},
            "test_split": "train",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}",
            "metric_list": [{"metric": "acc"}],
        }
        known = {
            "model": NAME,
            "base_url": f"{url}/v1/completions",
            "tokenizer": str(tokenizer),
            "num_concurrent": 4,
            "max_length": 512,
        }
        found = harness.simple_evaluate(
            model="local-completions", model_args=known, tasks=[task], log_samples=True, bootstrap_iters=0, batch_size=8
        )
    samples = sorted(found["samples"]["choices"], key=lambda sample: sample["doc_id"])
    theirs = [[float(pair[0]) for pair in sample["filtered_resps"]] for sample in samples]
    right = [max(range(CHOICES), key=scores.__getitem__) == row["label"] for scores, row in zip(own, rows, strict=True)]
    accuracy, through = 100 * sum(right) / len(rows), 100 * found["results"]["choices"]["acc,none"]
    apart = max(abs(a - b) for ours, other in zip(own, theirs, strict=True) for a, b in zip(ours, other, strict=True))
    assert abs(accuracy - through) <= 0.1, (accuracy, through)
    both = f"{through:.1f} % through the server, {accuracy:.1f} % by the model"
    return f"{len(rows)} questions: {both}; log-probabilities within {apart:.1e}"


def questions(run: Path) -> list[dict[str, Any]]:
    """The quickstart's questions with one right answer, and three wrong ones beside it."""
    made, draw = [], random.Random(1)
    for line in (run / "data" / "eval.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        choices = [row["answer"], *row.get("wrong", ())]
        if len(choices) == CHOICES and all(choices):
            draw.shuffle(choices)
            question = row["conversations"][-1]["content"]
            made.append({"question": question, "choices": choices, "label": choices.index(row["answer"])})
    return made


def own_scores(run: Path, rows: list[dict[str, Any]], folder: Path) -> list[list[float]]:
    """The sum of the log-probabilities of each choice's tokens, by the model; its tokenizer is written to `folder`."""
    import torch

    from penjing.train.load_model import load_trained

    loaded = load_trained(run)
    loaded.tokenizer.save(folder)
    scores = []
    with torch.no_grad():
        for row in rows:
            scores.append([])
            for choice in row["choices"]:
                # lm-eval puts a space before a choice, and cuts the ids where those of the question end.
                before = len(loaded.tokenizer.encode(row["question"].rstrip()))
                ids = loaded.tokenizer.encode(row["question"] + " " + choice)
                logp_TV = loaded.model(torch.tensor([ids]))[0].float().log_softmax(-1)
                scores[-1].append(sum(float(logp_TV[at - 1, ids[at]]) for at in range(before, len(ids))))
    return scores


CLIENTS: dict[str, Callable[[str, Path], str]] = {
    "litellm": litellm, "langchain_openai": langchain_openai, "lm_eval": lm_eval,
}  # fmt: skip


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("run", type=Path)
    run = reader.parse_args().run
    command = [sys.executable, "-m", "penjing", "serve", f"{NAME}={run}", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith("curl "))
        url = line.split()[1].partition("/v1/")[0]
        for name, check in CLIENTS.items():
            if importlib.util.find_spec(name) is None:
                print(f"{name}: not installed")
            else:
                print(f"{name}: {check(url, run)}", flush=True)
    finally:
        server.terminate()
        server.wait(40)


if __name__ == "__main__":
    main()
