"""Score a chat model on the held-out cases: `python -m tests.builtin.score [--model DIR]`."""

import argparse
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HELDOUT = Path(__file__).with_name("heldout.toml")
WEIGHTS = Path(__file__).parents[2] / "meshllm" / "model" / "builtin" / "weights"
MAX_TOKENS = 120  # per answer; the longest answer is a story of a few sentences
THREADS = 1  # of torch; at this size two threads wait more than they compute

Message = dict[str, str]
Reply = Callable[[Sequence[Message]], str]


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation, and the checks on its last answer."""

    id: str
    category: str
    turns: list[str]
    """The user's messages; the model's own answers go between them."""
    expect: list[str]
    """Regular expressions that must all match in the last answer."""
    ideal: str
    """One good answer, which passes."""
    forbid: list[str] = field(default_factory=list)
    """Regular expressions that must not match."""
    min_words: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The last answer to one case and the verdict."""

    case: Case
    answer: str
    passed: bool


def load(path: Path = HELDOUT) -> list[Case]:
    """Read the cases of a held-out file."""
    return [Case(**entry) for entry in tomllib.loads(path.read_text("utf-8"))["case"]]


def passes(case: Case, answer: str) -> bool:
    """Return whether a last answer passes the checks."""
    plain = answer.translate(str.maketrans("‘’“”", "''\"\""))  # noqa: RUF001 - curly quotes

    def found(pattern: str) -> bool:
        return re.search(pattern, plain, re.IGNORECASE | re.DOTALL) is not None

    return (
        len(plain.split()) >= case.min_words
        and all(map(found, case.expect))
        and not any(map(found, case.forbid))
    )


def converse(turns: Iterable[str], reply: Reply) -> str:
    """Run the user's turns against a model and return its last answer."""
    messages: list[Message] = []
    answer = ""
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answer = reply(messages)
        messages.append({"role": "assistant", "content": answer})
    return answer


def evaluate(cases: Iterable[Case], reply: Reply) -> list[Result]:
    """Run all cases and check the answers."""
    answers = ((case, converse(case.turns, reply)) for case in cases)
    return [Result(case, answer, passes(case, answer)) for case, answer in answers]


def rates(results: Sequence[Result]) -> dict[str, tuple[int, int]]:
    """Count (passed, asked) per category and in `total`, which comes last."""
    categories = dict.fromkeys(result.case.category for result in results)
    groups = {name: [r for r in results if r.case.category == name] for name in categories}
    groups["total"] = list(results)
    return {name: (sum(r.passed for r in group), len(group)) for name, group in groups.items()}


def greedy(folder: Path) -> Reply:
    """Load a model folder in float32 and return its greedy answers.

    Raises:
        FileNotFoundError: the folder contains no model.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"No `config.json` in `{folder}`")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32
    ).eval()

    def reply(messages: Sequence[Message]) -> str:
        prompt = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.inference_mode():
            tokens = model.generate(**prompt, do_sample=False, max_new_tokens=MAX_TOKENS)
        start = prompt["input_ids"].shape[1]
        return str(tokenizer.decode(tokens[0, start:], skip_special_tokens=True)).strip()

    return reply


def render(results: Sequence[Result], *, verbose: bool) -> str:
    """Format the table per category, after the failures if ``verbose``."""
    lines: list[str] = []
    for result in results if verbose else ():
        if not result.passed:
            asked = " | ".join(result.case.turns)
            wanted = " & ".join(result.case.expect)
            lines += [f"{result.case.id}: {asked}", f"  wanted {wanted}", f"  got {result.answer}"]
    for name, (passed, asked_count) in rates(results).items():
        share = passed / asked_count if asked_count else 0.0
        lines.append(f"{name:<12}{passed:>4} /{asked_count:>4}{share:>8.1%}")
    return "\n".join(lines)


def as_json(results: Sequence[Result]) -> str:
    """Format the counts and every failure as one JSON object."""
    scores = {name: {"passed": p, "asked": n} for name, (p, n) in rates(results).items()}
    failures = [
        {"id": r.case.id, "turns": r.case.turns, "answer": r.answer}
        for r in results
        if not r.passed
    ]
    return json.dumps({"scores": scores, "failures": failures}, ensure_ascii=False, indent=2)


def main() -> None:
    """Score the model of the command line."""
    parser = argparse.ArgumentParser(description="Score a chat model on the held-out cases")
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="a model folder")
    parser.add_argument("--verbose", action="store_true", help="show each failure")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    try:
        reply = greedy(arguments.model)
    except FileNotFoundError as error:
        parser.error(str(error))
    results = evaluate(load(), reply)
    print(as_json(results) if arguments.json else render(results, verbose=arguments.verbose))


if __name__ == "__main__":
    main()
