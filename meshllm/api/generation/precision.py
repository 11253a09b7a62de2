"""The precision of models, to compare and to report."""

from meshllm.status import ModelStatus


def precision_of(model: ModelStatus) -> str:
    """Return the precision of the weights of a model; empty if unknown."""
    if model.providers:
        return model.precision
    return model.dtype if model.quant in {"", "none"} else model.quant
