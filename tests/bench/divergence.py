"""Divergence of quantised logits: ``python -m tests.bench.divergence [--models A,B]``.

Models of published dimensions whose random weights have the structure of trained ones: channels of
very different sizes, a few of them outliers, and singular values that fall. The logits are scaled
so that the plain model's are as certain as those of trained ones. On the same tokens the columns
are the mean Kullback-Leibler divergence from the plain model's next token, its largest value, and
the share of tokens with the same highest logit; `wire` sends hidden states in 8 bits between the
ranks of a ring of three.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from meshllm.bench.ring_table import DIMENSIONS
from meshllm.model.modules.quantise import quantise
from meshllm.model.split.meta_model import quiet
from meshllm.model.split.onemkl import warm_up_onemkl
from meshllm.names import Quant
from tests.bench.quality import KINDS, WIRE, send_quantised
from tests.bench.report import Report, parser_of

ENTROPY = 3.0  # nats of a next token, about what small trained models have on prose
SPREAD = 0.25  # standard deviation of the logarithm of a channel's size
OUTLIERS, OUTLIER = 0.005, 8.0  # share of the channels of rows that are larger, and how much
RANK, LOW_RANK = 32, 0.5  # of the part whose singular values fall, and its share of the norm


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of quantisation of one model."""

    model: str
    kind: str
    megabytes: float
    """Size of the quantised matrices."""
    divergence: float
    """Mean over the tokens, in nats."""
    most: float
    """The largest of a token, in nats."""
    same: float
    """Share of tokens with the same highest logit."""


def build(name: str, layers: int | None) -> Any:
    """Make a model with structured random weights, always the same."""
    torch.manual_seed(0)
    config = DIMENSIONS[name]()
    if layers:
        config = type(config)(
            **config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
        )
    warm_up_onemkl()
    with quiet():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.copy_(structured(module.weight.shape))
        elif weight is not None and weight.shape == (config.hidden_size,):  # a norm of rows
            weight.data.copy_(channels(len(weight), OUTLIERS))
    return model


def channels(count: int, outliers: float = 0.0) -> Tensor:
    """Draw the sizes [K] of channels, a share of them outliers."""
    sizes = torch.exp(SPREAD * torch.randn(count))
    sizes[torch.rand(count) < outliers] *= OUTLIER
    return sizes


def structured(shape: Sequence[int]) -> Tensor:
    """Draw a matrix [N, K] with the structure of trained ones; it keeps the size of its inputs."""
    outputs, inputs = shape
    plain = torch.randn(outputs, inputs)
    sizes = torch.arange(1, RANK + 1).reciprocal()
    low = (torch.randn(outputs, RANK) * sizes) @ torch.randn(RANK, inputs)
    low *= math.sqrt(LOW_RANK / (1 - LOW_RANK)) / low.std()
    weights = (plain + low) * channels(inputs) * channels(outputs)[:, None]
    return weights / (weights.std() * math.sqrt(inputs))


def tokens_of(vocabulary: int, count: int) -> Tensor:
    """Draw token ids [1, T] as frequent as words of a text (Zipf)."""
    torch.manual_seed(1)
    frequency = torch.arange(1, vocabulary + 1).reciprocal()
    return torch.multinomial(frequency, count, replacement=True)[None]


def entropy_of(logits: Tensor) -> float:
    """Return the mean entropy of the next token, of logits [T, V]."""
    logs = logits.log_softmax(-1)
    return float(-(logs.exp() * logs).sum(-1).mean())


def temperature_of(logits: Tensor) -> float:
    """Return what to divide logits [T, V] by, so that their mean entropy is `ENTROPY`."""
    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = math.sqrt(low * high)
        entropy = entropy_of(logits / middle)
        low, high = (middle, high) if entropy < ENTROPY else (low, middle)
    return math.sqrt(low * high)


@torch.inference_mode()
def measure(name: str, kinds: Sequence[str], layers: int | None, count: int) -> Iterator[Row]:
    """Compare the kinds of quantisation of a model with plain weights."""
    model = build(name, layers)
    ids = tokens_of(model.config.vocab_size, count)
    plain = model(input_ids=ids).logits[0].float()
    temperature = temperature_of(plain)
    plain = (plain / temperature).log_softmax(-1)
    for kind in kinds:
        if kind != Quant.NONE:
            model = build(name, layers)
        report = quantise(model, Quant.NONE if kind == WIRE else Quant(kind))
        if kind == WIRE:
            send_quantised(model.model.layers)
        logits = (model(input_ids=ids).logits[0].float() / temperature).log_softmax(-1)
        divergence = (plain.exp() * (plain - logits)).sum(-1)
        same = (plain.argmax(-1) == logits.argmax(-1)).float().mean()
        most = float(divergence.max())
        yield Row(name, kind, report.bytes / 1e6, float(divergence.mean()), most, float(same))


def table(rows: Sequence[Row]) -> list[str]:
    """Lay out rows."""
    line = "{:<18} {:<6} {:>7} {:>11} {:>11} {:>11}".format
    lines = [line("model", "kind", "MB", "divergence", "largest", "same token")]
    for row in rows:
        figures = f"{row.divergence:.5f}", f"{row.most:.4f}", f"{row.same:.1%}"
        lines.append(line(row.model, row.kind, f"{row.megabytes:.0f}", *figures))
    return lines


def main(args: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of("divergence", __doc__)
    parser.add_argument("--models", default="qwen3-0.6b,llama-3.2-1b")
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--layers", type=int, help="fewer layers than the models have")
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args(args)
    report, kinds = Report(options), options.kinds.split(",")
    rows = [
        row
        for name in options.models.split(",")
        for row in measure(name, kinds, options.layers, options.tokens)
    ]
    report.say(*table(rows))
    report.write(rows, layers=options.layers, tokens=options.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
