"""Drafting of one scope."""

from meshllm.model.speculation.prompt_lookup import SuffixDrafting
from meshllm.protocol.drafting.drafter import ScopedDrafting


def test_texts_of_another_scope_are_not_drafted() -> None:
    shared = SuffixDrafting()
    for scope, tokens in ((None, [1, 2, 3]), ("key", [1, 2, 4])):
        ScopedDrafting(shared, scope).keep(tokens)

    found = []
    for scope in (None, "key", "other"):
        drafter = ScopedDrafting(shared, scope).begin()
        drafter.extend([1, 2])
        drafter.look()
        found.append(drafter.draft(1))

    assert found == [(3,), (4,), ()]
