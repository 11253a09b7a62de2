"""lm-eval's `local-completions`, beside its own `hf` backend on the whole model.

The task is local and offline: questions with choices, scored by loglikelihood, and texts.
"""

import json
import os
from pathlib import Path
from typing import Any

import lm_eval
from calls import run
from lm_eval.tasks import TaskManager

MODEL = os.environ["MESHLLM_TEST_MODEL"]
"""Folder of the whole model, which holds its tokenizer."""
URL = f"{os.environ['OPENAI_BASE_URL']}/completions"
TOLERANCE = 1e-4
MIN_QUESTIONS = 40

NAMES = "Ada", "Ben", "Cleo", "Dov", "Edda"
THINGS = "a fox", "a cow", "a ring", "a node", "a river", "a lamp", "a song", "a map"
QUESTIONS = [
    {
        "question": f"{name} saw {thing} near the mill. What did {name} see?",
        "choices": [f" {thing}", f" {THINGS[(place + 1) % len(THINGS)]}", " nothing at all"],
        "gold": 0,
    }
    for name in NAMES
    for place, thing in enumerate(THINGS)
]
TASK = {
    "task": "choices",
    "dataset_path": "json",
    "test_split": "train",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "gold",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


def loglikelihoods() -> str:
    mine, theirs = (_scores(each) for each in (RING, WHOLE))
    assert len(mine) == len(theirs) == 3 * len(QUESTIONS)
    worst = max(abs(one - other) for (one, _), (other, _) in zip(mine, theirs, strict=True))
    assert worst <= TOLERANCE, f"a loglikelihood differs by {worst}"
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in theirs]
    return f"{len(mine)} of them, which differ by {worst:.1e} at most"


def accuracy() -> str:
    metrics = "acc,none", "acc_norm,none"
    ring, whole = ([each["results"]["choices"][name] for name in metrics] for each in (RING, WHOLE))
    assert ring == whole
    return f"{ring} of the ring, {whole} of the whole model"


def _evaluate(kind: str, **arguments: Any) -> Any:
    """Return what lm-eval says of the task."""
    path = Path("questions.jsonl")
    path.write_text("".join(f"{json.dumps(each)}\n" for each in QUESTIONS))
    task = TASK | {"dataset_kwargs": {"data_files": str(path.absolute())}}
    return lm_eval.simple_evaluate(
        kind,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(),
        log_samples=True,
        bootstrap_iters=0,
    )


def _scores(found: Any) -> list[tuple[float, bool]]:
    """Return the loglikelihood of each choice, and whether it is what greedy decoding writes."""
    samples = sorted(found["samples"]["choices"], key=lambda each: each["doc_id"])
    return [
        (float(value), bool(greedy)) for each in samples for value, greedy in each["filtered_resps"]
    ]


if __name__ == "__main__":
    RING = _evaluate(
        "local-completions", model="builtin", base_url=URL, tokenizer=MODEL, num_concurrent=4,
        tokenizer_backend="huggingface", max_retries=1,
    )  # fmt: skip
    WHOLE = _evaluate("hf", pretrained=MODEL, dtype="float32", device="cpu", batch_size=1)
    run(loglikelihoods, accuracy)
