"""Score a model on dev.txt, held-out wordings: `python -m tests.builtin.training.dev_score`."""

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshllm.model.files.source import resolve
from tests.builtin.training.grammar import lines

WEIGHTS = resolve("builtin").folder


class Speaker:
    """A model that answers greedily."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Load model and tokenizer from a folder."""
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.no_grad()
    def answer(self, messages: list[dict[str, str]]) -> str:
        """Return the answer to a conversation; one without an end token is marked."""
        inputs = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = self.model.generate(**inputs, max_new_tokens=200, do_sample=False)
        ids = made[0, inputs["input_ids"].shape[1] :]
        ended = bool(ids[-1] == self.tokenizer.eos_token_id)
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return text if ended else f"{text} [no end]"

    def talk(self, questions: list[str]) -> str:
        """Ask the questions one after another; return the last answer."""
        messages: list[dict[str, str]] = []
        for question in questions:
            messages.append({"role": "user", "content": question.strip()})
            messages.append({"role": "assistant", "content": self.answer(messages)})
        return messages[-1]["content"]


def main() -> None:
    """Print the failures and the score of each category."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="folder to score")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--file", default="dev.txt", help="prompts and patterns")
    options = parser.parse_args()
    torch.set_num_threads(1)
    speaker = Speaker(options.model, getattr(torch, options.dtype))
    results: dict[str, list[bool]] = defaultdict(list)
    for line in lines(options.file):
        category, questions, patterns = line.split(" | ", 2)
        answer = speaker.talk(questions.split(">>"))
        good = all(re.search(p.strip(), answer, re.IGNORECASE) for p in patterns.split(" & "))
        results[category].append(good and not answer.endswith("[no end]"))
        if not results[category][-1]:
            sys.stdout.write(f"MISS {category}: {questions!r} -> {answer!r}\n")
    for category, found in results.items():
        sys.stdout.write(f"{category} {sum(found)}/{len(found)}\n")
    every = [good for found in results.values() for good in found]
    sys.stdout.write(f"all {sum(every)}/{len(every)}\n")


if __name__ == "__main__":
    main()
