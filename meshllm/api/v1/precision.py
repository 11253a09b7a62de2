"""The precision of models, to compare and to report."""

from meshllm.status import ModelStatus

_BITS = {
    "int4": 4, "int8": 8, "fp8": 8, "bf16": 16, "bfloat16": 16, "fp16": 16, "float16": 16,
    "fp32": 32, "float32": 32,
}  # fmt: skip


def bits_of(precision: str) -> int:
    """Return the bits of a weight; 0 if the precision is unknown."""
    return _BITS.get(precision.lower(), 0)


def precision_of(model: ModelStatus) -> str:
    """Return the precision of the weights of a model; empty if unknown."""
    if model.providers:
        return model.precision
    return model.dtype if model.quant in {"", "none"} else model.quant
