"""Stubs for the modules that a shard does not hold.

A stub keeps its global index and its name in the model, so the stock forward finds what it counts,
enumerates and reads. Reading an attribute that a stub lacks returns that of the module that it
replaces, on meta: some families read the kind of their layers.
"""

from typing import Any

from torch import Tensor, nn

_HIDDEN = "hidden_states"  # the parameter of every family's layers


class Stub(nn.Module):
    """Replaces a module without registering it, so that its parameters are not part of ours."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "replaced", replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replaced, name)


class LayerStub(Stub):
    """Replaces a layer; returns the hidden state unchanged."""

    def __init__(self, layer: nn.Module, arity: int) -> None:
        super().__init__(layer)
        self.rest = (None,) * (arity - 1) if arity else None
        self.hidden: Tensor | None = None
        """If set, returned instead of the input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a layer would: the hidden state, and None for the rest."""
        hidden = self.hidden if self.hidden is not None else first(args, kwargs)
        return hidden if self.rest is None else (hidden, *self.rest)


class EndStub(Stub):
    """Replaces a module before the first or after the last layer; its result is discarded."""

    def __init__(self, end: nn.Module) -> None:
        super().__init__(end)
        # A wider dtype here would widen what the stock forward derives from it, e.g. rotary tables.
        self.dtype = next(end.parameters()).dtype
        self.is_embedding = isinstance(end, nn.Embedding)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the input, or a zero that fits any shape if the input is not a hidden state."""
        value = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        if self.is_embedding or not value.is_floating_point():
            return value.new_zeros(1, 1, 1, dtype=self.dtype)
        return value


class ProjectionStub(Stub):
    """Replaces a linear module whose products nobody needs; returns zeros of their shape."""

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros [..., N] for [..., K]."""
        return x.new_zeros(*x.shape[:-1], len(self.weight))


class EndOfSpan(Exception):
    """Aborts the stock forward at the end of a span; carries the hidden state."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden  # [B, T, D]


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state from the arguments of a layer."""
    hidden: Tensor = args[0] if args else kwargs[_HIDDEN]
    return hidden


def with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer with another hidden state."""
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {_HIDDEN: hidden})
