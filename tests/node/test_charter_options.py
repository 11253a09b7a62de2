"""The charter that follows from the options of a node."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshllm.errors import ModelError, ModelMissing, UserError
from meshllm.model.capacity import shape_of
from meshllm.model.files.source import resolve
from meshllm.names import Digest, NodeId, Quant, show
from meshllm.node.charter_options import (
    amend,
    create_charter,
    names_in,
    refuse_other,
    serve,
    stop,
    with_own_entry,
)
from meshllm.node.node_names import Names, resolve_names
from meshllm.node.options import ModelOptions, NodeOptions
from meshllm.protocol.membership.charter import MAX_SERVED, Charter
from meshllm.protocol.membership.records import MAX_MEMBERS, Profile
from meshllm.protocol.session.messages import DType
from meshllm.protocol.trust.identity import NodeKey
from tests.builders.node_options import node_options
from tests.builders.snapshots import CONFIG, charter

A, B, C = (NodeKey(bytes([n]) * 32).node for n in range(3))
LONGEST = 1 << 20
PROFILES = {A: Profile("desk", "1", (), 0), B: Profile("attic", "1", (), 0),
            C: Profile("attic", "1", (), 0)}  # fmt: skip


def options(**wishes: Any) -> NodeOptions:
    return node_options(Path("unused"), **wishes)


@pytest.mark.parametrize(("context", "told"), [(None, 128), (77, 77)])
def test_a_first_charter_names_the_model(llama: Path, context: int | None, told: int) -> None:
    source = resolve(str(llama))
    shape = shape_of(source, None)

    made = create_charter(options(context=context), shape, CONFIG)

    assert (made.version, made.dtype, made.config_digest) == (1, DType.FLOAT32, CONFIG)
    assert (made.shape.layers, made.shape.context) == (6, told)
    assert Charter.decode(made.encode()) == made


def test_the_quantisation_is_that_of_the_mesh(llama: Path) -> None:
    shape = shape_of(resolve(str(llama)), None, Quant.INT8)

    made = create_charter(options(quant=Quant.INT8), shape, CONFIG)

    assert made.quant is Quant.INT8
    refuse_other(made, "llama", CONFIG, Quant.INT8)
    refuse_other(made, "llama", CONFIG, None)
    with pytest.raises(ModelError, match="uses `--quant int8`, not `none`"):
        refuse_other(made, "llama", CONFIG, Quant.NONE)


def test_empty_options_change_nothing() -> None:
    before = charter()

    assert amend(before, options(), PROFILES, LONGEST) is before
    assert amend(before, options(policy="auto", exclude=(), prefer=()), PROFILES, LONGEST) is before
    assert amend(before, options(context=before.shape.context), PROFILES, LONGEST) is before


def test_changed_options_are_a_new_version() -> None:
    wishes = options(
        policy="throughput", members=2, exclude=("desk",), prefer=(show(B),), context=5
    )

    changed = amend(charter(), wishes, PROFILES, LONGEST)

    assert changed.version == 2
    assert (changed.policy, changed.members) == ("throughput", 2)
    assert (changed.exclude, changed.prefer) == ((A,), (B,))
    assert changed.shape.context == 5
    assert amend(changed, wishes, PROFILES, LONGEST) is changed


def test_no_members_let_the_policy_choose() -> None:
    before = amend(charter(), options(members=2), PROFILES, LONGEST)

    assert amend(before, options(members=0), PROFILES, LONGEST).members is None
    (fox,) = serve(before, named("fox"), ModelOptions("fox", members=2)).models
    assert fox.members == 2
    assert serve(before, before, ModelOptions("tiny", members=0)).members is None


def test_an_unknown_name_keeps_the_previous_nodes() -> None:
    wishes = options(exclude=("desk", "loft"), prefer=("cellar",))
    before = amend(charter(), options(exclude=(show(B),), prefer=(show(A),)), PROFILES, LONGEST)

    changed = amend(before, wishes, PROFILES, LONGEST)

    names = resolve_names(names_in(wishes), PROFILES)
    assert names == Names((A,), ("loft", "cellar"), ())
    assert (changed.exclude, changed.prefer) == (tuple(sorted((A, B))), (A,))


@pytest.mark.parametrize(
    ("entry", "entries"),
    [(("self",), (B,)), (("desk",), (A, B)), (("loft",), (B,)), (("attic",), (B,)), ((), ())],
)
def test_a_node_that_names_entries_is_one_and_unknown_names_are_none(
    entry: tuple[str, ...], entries: tuple[NodeId, ...]
) -> None:
    before = amend(charter(), options(entry=(show(A),)), PROFILES, LONGEST)
    wishes = with_own_entry(options(entry=entry, trust=("cellar",)), B, is_founder=True)

    assert before.entries == (A,)
    assert amend(before, wishes, PROFILES, LONGEST).entries == entries
    assert with_own_entry(options(), B, is_founder=True) == options()


@pytest.mark.parametrize(
    ("trust", "entries"), [((), (B,)), (("desk",), (A, B)), ((show(C),), (B, C))]
)
def test_nodes_that_the_founder_trusts_may_read_prompts_and_others_may_not(
    trust: tuple[str, ...], entries: tuple[NodeId, ...]
) -> None:
    wishes = with_own_entry(options(trust=trust), B, is_founder=True)

    assert amend(charter(), wishes, PROFILES, LONGEST).entries == tuple(sorted(entries))
    assert with_own_entry(options(trust=trust), B, is_founder=False) == options(trust=trust)


def test_more_nodes_that_may_read_prompts_than_a_mesh_has_are_refused() -> None:
    """They could not be published, so that every node could read prompts."""
    names = tuple(f"desk {number}" for number in range(MAX_MEMBERS))

    def named(**wishes: tuple[str, ...]) -> tuple[str, ...] | None:
        return with_own_entry(options(**wishes), B, is_founder=True).entry

    for option in ("trust", "entry"):
        with pytest.raises(UserError, match=f"`--{option}` names 64 nodes beside this one") as told:
            named(**{option: names})
        assert told.value.hint == "name at most 63"
        assert named(**{option: (*names[1:], "desk 1", "self")}) == (show(B), *names[1:])
    assert with_own_entry(options(trust=names), B, is_founder=False) == options(trust=names)


def test_an_ambiguous_name_keeps_the_previous_nodes() -> None:
    wishes = options(exclude=("desk", "attic"), prefer=("attic",))
    before = amend(charter(), options(prefer=(show(A),)), PROFILES, LONGEST)

    changed = amend(before, wishes, PROFILES, LONGEST)

    assert resolve_names(names_in(wishes), PROFILES) == Names((A,), (), ("attic", "attic"))
    assert (changed.exclude, changed.prefer) == ((A,), (A,))


def test_the_context_is_capped_by_the_model() -> None:
    assert amend(charter(), options(context=10_000), PROFILES, 50).shape.context == 50


def test_an_empty_list_resets() -> None:
    changed = amend(charter(), options(exclude=("desk",)), PROFILES, LONGEST)

    assert amend(changed, options(exclude=()), PROFILES, LONGEST).exclude == ()


def test_another_model_is_refused() -> None:
    refuse_other(charter(), "any name", CONFIG)
    with pytest.raises(ModelError, match="The mesh serves `tiny`") as raised:
        refuse_other(charter(), "other", Digest(bytes(32)))

    assert raised.value.hint


STOP = "stop that one with `meshllm model stop org/fox`, or "
COPY = "copy this one to a folder of its own"


def named(name: str, **changes: Any) -> Charter:
    base = charter()
    return replace(base, shape=replace(base.shape, name=name), **changes)


def test_a_mesh_serves_another_model_and_changes_it() -> None:
    asked = ModelOptions("fox", None, "throughput", 2, 3, 77, ("f",))

    both = serve(charter(), named("fox"), asked)

    (fox,) = both.models
    assert (fox.policy, fox.members, fox.replicas, fox.aliases) == ("throughput", 2, 3, ("f",))
    assert fox.shape.context == 77
    (changed,) = serve(both, fox, ModelOptions("f", replicas=1)).models
    assert changed == replace(fox, replicas=1)
    assert stop(both, "f") == charter()


def test_the_first_model_is_changed_and_always_served() -> None:
    first = charter()

    changed = serve(first, first, ModelOptions("tiny", replicas=2, aliases=("t",)))

    assert (changed.replicas, changed.aliases, changed.models) == (2, ("t",), ())
    assert changed.version == first.version + 1
    with pytest.raises(UserError, match="first model of the mesh"):
        stop(first, "tiny")
    for unknown in ("fox", ""):
        with pytest.raises(ModelMissing, match=f"does not serve `{unknown}`"):
            stop(first, unknown)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"members": 65}, "65 members"),
        ({"replicas": 0}, "0 replicas"),
        ({"context": 0}, "0 tokens"),
        ({"policy": "greenest"}, "greenest"),
        ({"aliases": tuple("abcde")}, "5 aliases"),
        ({"aliases": ("a,b",)}, "Invalid alias"),
        ({"aliases": ("",)}, "Invalid alias"),
        ({"aliases": ("a" * 65,)}, "Invalid alias"),
        ({"aliases": ("a\n",)}, "Invalid alias"),
        ({"aliases": ("tiny",)}, "another model as `tiny`"),
    ],
)
def test_invalid_options_of_a_model_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        serve(charter(), named("fox"), ModelOptions("fox", **changes))


def test_the_first_model_takes_no_name_of_another_one() -> None:
    first = charter()
    both = serve(first, named("fox"), ModelOptions("fox", aliases=("small",)))

    for name in ("fox", "small"):
        with pytest.raises(UserError, match=f"another model as `{name}`"):
            serve(both, first, ModelOptions("tiny", aliases=(name,)))


def test_an_alias_in_use_has_a_hint() -> None:
    with pytest.raises(UserError) as caught:
        serve(charter(), named("fox"), ModelOptions("fox", aliases=("tiny",)))

    assert caught.value.hint == "choose another `--alias`"  # the first model cannot be stopped
    both = serve(charter(), named("fox"), ModelOptions("fox"))
    with pytest.raises(UserError) as caught:
        serve(both, named("owl"), ModelOptions("owl", aliases=("fox",)))
    assert caught.value.hint == STOP.replace("org/", "") + "choose another `--alias`"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("org/fox", {"config_digest": Digest(bytes(32))}),
        ("small", {"quant": Quant.INT4}),
        ("org/fox@int8", {}),
    ],
    ids=["another model", "alias", "precise name"],
)
def test_a_name_in_use_has_a_hint_how_to_serve_both(name: str, changes: dict[str, Any]) -> None:
    fox = named("org/fox", quant=Quant.INT8)
    both = serve(charter(), fox, ModelOptions("org/fox", aliases=("small",)))

    with pytest.raises(UserError, match=f"another model as `{name}`") as caught:
        serve(both, named(name, **changes), ModelOptions(name))

    assert caught.value.hint == STOP + COPY


def test_quantisations_of_a_model_share_its_name_and_no_other_one() -> None:
    small = named("tiny", quant=Quant.INT8)

    both = serve(charter(), small, ModelOptions("tiny", replicas=2))

    assert [each.quant for each in both.served] == [Quant.NONE, Quant.INT8]
    assert both.models[0].replicas == 2
    for alias in ("tiny", "tiny@int8", "tiny@bfloat16"):
        with pytest.raises(UserError, match=f"another model as `{alias}`"):
            serve(both, named("tiny", quant=Quant.INT4), ModelOptions("tiny", aliases=(alias,)))
    with pytest.raises(UserError, match="the first model") as caught:
        stop(both, "tiny")
    assert caught.value.hint == "stop another quantisation: `meshllm model stop tiny@int8`"
    assert stop(both, "tiny@int8").served == charter().served
    with pytest.raises(ModelMissing) as missing:
        stop(both, "owl")
    assert missing.value.hint == "served: `tiny`, `tiny@int8`"


def test_names_are_of_one_model_and_models_are_limited() -> None:
    mesh = charter()
    for number in range(MAX_SERVED - 1):
        mesh = serve(mesh, named(f"m{number}"), ModelOptions(f"m{number}"))

    with pytest.raises(UserError, match=f"serves {MAX_SERVED} models"):
        serve(mesh, named("fox"), ModelOptions("fox"))
    assert serve(mesh, mesh.models[0], ModelOptions("m0", replicas=2)).models[0].replicas == 2
