"""What a request needs of what answers it: precision, context, and what no engine does."""

from meshllm.names import bits_of
from meshllm.request import Request

PROMPT = "prompt"  # what a provider lacks if its context is too short for it


def lacking(precision: str, context: int, request: Request, *, is_ring: bool = False) -> str:
    """Return the need of a request that a model does not meet; empty if it meets all.

    Of the rings of a model only precision and context are compared here. Whether one is exact
    depends on its nodes, and the entry itself refuses a prompt that is too long.
    """
    if request.needs_exact and not is_ring:  # engines compute in their own way
        return "meshllm.exact"
    if bits_of(precision) < request.min_bits:
        return "meshllm.min_precision"
    if 0 < context < len(request.ids) and not is_ring:
        return PROMPT
    return "meshllm.min_context" if context < request.min_context else ""


def waits_for_ring(request: Request) -> bool:
    """Return whether a request waits for a ring of its model, also if a provider could answer.

    An answer that has begun does, since only rings continue its tokens.
    """
    return request.needs_exact or bool(request.given or request.beyond_engines)
