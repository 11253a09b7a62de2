"""Quality loss of quantisation: ``python -m tests.bench.quality [--kinds none,int8,int4,wire]``.

The builtin model answers the held-out cases greedily with plain and with quantised weights, and
with plain ones in a ring of three that sends hidden states in 8 bits (`wire`). The columns are the
score, the mean loss of the ideal answers, the share of answers identical to the plain model's, and
on the plain model's answers the mean loss and the share of tokens with the highest logit.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshllm.model.modules.quantise import quantise
from meshllm.model.split.meta_model import quiet
from meshllm.model.split.onemkl import warm_up_onemkl
from meshllm.model.wire.payload import from_payload, to_payload
from meshllm.names import Quant
from tests.builtin.score import MAX_TOKENS, WEIGHTS, Case, Message, Result, evaluate, load

WIRE = "wire"
KINDS = (*Quant, WIRE)
NODES = 3  # nodes of the ring


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one kind of quantisation."""

    kind: str
    """The kind as in ``--kinds``."""
    megabytes: float
    """Size of the quantised matrices."""
    loss: float
    """Mean loss of the ideal answers of cases with one question, in nats per token."""
    plain_loss: float
    """The same for the plain model's answers."""
    passed: int
    asked: int
    same: float
    """Share of the answers that are identical to those of plain weights."""
    agree: float
    """Share of the tokens of the plain model's answers that have the highest logit."""


class Speaker:
    """The builtin model with one kind of quantisation."""

    def __init__(self, kind: str) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(WEIGHTS, local_files_only=True)
        warm_up_onemkl()
        with quiet():
            self.model: Any = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype="auto").eval()
        self.kind = kind
        self.report = quantise(self.model, Quant.NONE if kind == WIRE else Quant(kind))
        if kind == WIRE:
            send_quantised(self.model.model.layers)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return a conversation as tokens, up to the start of the answer."""
        ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return ids

    @torch.inference_mode()
    def reply(self, messages: Sequence[Message]) -> str:
        """Answer greedily."""
        prompt = torch.tensor([self.prompt(messages)])
        tokens = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
        )
        text = self.tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)
        return str(text).strip()

    @torch.inference_mode()
    def authorize(self, question: str, answer: str) -> tuple[Tensor, Tensor]:
        """Return the loss of each token of an answer, and whether it has the highest logit."""
        prompt = self.prompt([{"role": "user", "content": question}])
        ids = torch.tensor([prompt + self.tokenizer.encode(answer, add_special_tokens=False)])
        logits = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()  # [T, V]
        target = ids[0, len(prompt) :]
        loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        return loss, logits.argmax(-1) == target


def send_quantised(layers: nn.ModuleList) -> None:
    """Quantise hidden states behind the layers of each rank; the last one sends to the entry."""
    for rank in range(1, NODES + 1):
        layers[len(layers) * rank // NODES - 1].register_forward_hook(_travel)


def _travel(_module: nn.Module, _inputs: object, hidden: Tensor) -> Tensor:
    """Quantise a hidden state [1, T, D] as for the next rank."""
    return from_payload(*to_payload(hidden, int8=True))


def run(kinds: Sequence[str], cases: Sequence[Case]) -> list[Row]:
    """Evaluate the plain model, then the others."""
    plain = evaluate(cases, Speaker(Quant.NONE).reply)
    return [_row(Speaker(kind), plain) for kind in kinds]


def _row(speaker: Speaker, plain: Sequence[Result]) -> Row:
    results = evaluate([result.case for result in plain], speaker.reply)
    single = [result for result in plain if len(result.case.turns) == 1]
    ideal = [speaker.authorize(one.case.turns[0], one.case.ideal)[0] for one in single]
    own = [speaker.authorize(one.case.turns[0], one.answer) for one in single]
    same = [mine.answer == theirs.answer for mine, theirs in zip(results, plain, strict=True)]
    return Row(
        kind=speaker.kind,
        megabytes=speaker.report.bytes / 1e6,
        loss=float(torch.cat(ideal).mean()),
        plain_loss=float(torch.cat([loss for loss, _ in own]).mean()),
        passed=sum(result.passed for result in results),
        asked=len(results),
        same=sum(same) / len(same),
        agree=float(torch.cat([likely for _, likely in own]).float().mean()),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quality", description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--cases", type=int, help="ask the first few only")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = run(options.kinds.split(","), load()[: options.cases])
    print(json.dumps([asdict(row) for row in rows]) if options.json else _table(rows))
    return 0


def _table(rows: Sequence[Row]) -> str:
    line = "{:<6} {:>6} {:>8} {:>11} {:>11} {:>12} {:>12}".format
    lines = [line("kind", "MB", "loss", "plain loss", "score", "same answer", "same token")]
    for row in rows:
        score = f"{row.passed} of {row.asked}"
        losses = f"{row.loss:.4f}", f"{row.plain_loss:.4f}"
        shares = f"{row.same:.1%}", f"{row.agree:.2%}"
        lines.append(line(row.kind, f"{row.megabytes:.1f}", *losses, score, *shares))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
