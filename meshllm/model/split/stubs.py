"""Stand-ins for the modules that a shard does not hold.

A stub keeps its global index and its name in the model, so the stock forward finds what it counts,
enumerates and asks for. Reading an attribute that a stub lacks gives that of the module it stands
for, on meta: some families ask their layers what kind they are.
"""

from typing import Any

from torch import Tensor, nn


class Stub(nn.Module):
    """Stands for a module without being its parent, so that its parameters are none of ours."""

    def __init__(self, stands_for: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "stands_for", stands_for)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.stands_for, name)


class LayerStub(Stub):
    """Passes the hidden state on in place of a layer."""

    def __init__(self, layer: nn.Module, arity: int) -> None:
        super().__init__(layer)
        self.rest = (None,) * (arity - 1) if arity else None
        self.hidden: Tensor | None = None
        """What to pass on instead of what comes in."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a layer would: the hidden state, and nothing else."""
        hidden = self.hidden if self.hidden is not None else first(args, kwargs)
        return hidden if self.rest is None else (hidden, *self.rest)


class EndStub(Stub):
    """Stands for a module before the first or after the last layer; its result is thrown away."""

    def __init__(self, end: nn.Module) -> None:
        super().__init__(end)
        # A wider type here would widen what the stock forward derives from it, as rotary tables.
        self.dtype = next(end.parameters()).dtype
        self.looks_up = isinstance(end, nn.Embedding)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the input, or a zero that fits any shape when the input is no hidden state."""
        value = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        if self.looks_up or not value.is_floating_point():
            return value.new_zeros(1, 1, 1, dtype=self.dtype)
        return value


class Stop(Exception):
    """Ends the stock forward where a span ends, with the hidden state."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden  # [B, T, D]


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Pick the hidden state from the arguments of a layer."""
    hidden: Tensor = args[0] if args else kwargs[key(kwargs)]
    return hidden


def key(kwargs: dict[str, Any]) -> str:
    """Name the keyword that carries the hidden state, in a call without positional arguments."""
    return "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
