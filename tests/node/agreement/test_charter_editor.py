"""How a node changes the charter of its mesh."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.errors import LinkLost, MeshError, ModelError, ModelMissing, UserError
from meshllm.names import Digest, ModelKey, Quant, Span, show
from meshllm.node.agreement.charter_editor import CharterEditor
from meshllm.node.options import ModelOptions
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.trust.identity import NodeKey
from tests.builders.node_options import node_options
from tests.builders.snapshots import charter

A, B, C = (NodeKey(bytes([n]) * 32).node for n in range(3))
LONGEST = 1 << 20
OWN_CONTEXT = 1 << 14
OTHER = replace(
    charter(), config_digest=Digest(b"o" * 16), shape=replace(charter().shape, name="other")
)


class FakeMesh:
    """A mesh that takes each charter, or none."""

    def __init__(self, **wishes: Any) -> None:
        self.charter: Charter | None = charter()
        self.profiles: dict[bytes, Profile] = {}
        self.takes = True
        self.is_here = True
        self.described = list[tuple[object, ...]]()
        self.editor = CharterEditor(
            node_options(Path("unused"), **wishes),
            cast("Any", self),
            cast("Any", SimpleNamespace(act=lambda _: None)),
            cast("Any", self),
        )

    def publish(self, *, charter: Charter, now: float) -> None:
        assert now >= 0
        self.charter = charter if self.takes else self.charter

    async def describe(self, *asked: object) -> Charter:
        self.described.append(asked)
        if asked[0] != OTHER.shape.name:
            raise ModelMissing("It is not here")
        return OTHER

    async def held(self, charters: Sequence[Charter]) -> list[ModelKey]:
        return [each.key for each in charters if self.is_here]

    async def longest(self, charter: Charter) -> int:
        assert charter.key == OTHER.key
        return OWN_CONTEXT

    def know(self, node: bytes, name: str) -> None:
        self.profiles[node] = Profile(name, "1", (), 0)


async def test_a_model_is_served_and_stopped() -> None:
    mesh = FakeMesh()

    served = await mesh.editor.serve_model(ModelOptions("other", replicas=2))

    assert mesh.charter is not None
    assert (served.key, served.replicas) == (OTHER.key, 2)
    assert [each.key for each in mesh.charter.served] == [charter().key, OTHER.key]
    mesh.editor.stop_model("other")
    assert [each.key for each in mesh.charter.served] == [charter().key]
    with pytest.raises(ModelError, match="does not serve `other`"):
        mesh.editor.stop_model("other")


async def test_a_model_that_is_served_already_is_looked_for_if_it_is_not_here() -> None:
    mesh = FakeMesh()
    await mesh.editor.serve_model(ModelOptions("other", aliases=("small",)))
    assert mesh.charter

    await mesh.editor.serve_model(ModelOptions("other"))
    assert len(mesh.described) == 1
    mesh.is_here = False
    for name in ("other", "small"):  # the second is not the name of a model here
        served = await mesh.editor.serve_model(ModelOptions(name))
        assert served.key == OTHER.key
    assert mesh.described[1:] == [
        (name, OTHER.quant, OTHER.shape.context) for name in ("other", "small")
    ]


async def test_a_quantisation_is_served_beside_another_one_by_any_name_of_that() -> None:
    mesh = FakeMesh()
    asked = list[tuple[object, ...]]()

    async def describe(name: str, quant: Quant, _: int) -> Charter:
        asked.append((name, quant))
        return replace(OTHER, quant=quant)

    mesh.describe = describe  # type: ignore[method-assign,assignment]  # as it is called
    await mesh.editor.serve_model(ModelOptions("other", aliases=("small",)))

    for name, quant in (("small", "int8"), ("other@int8", "int4"), ("other", "int8")):
        served = await mesh.editor.serve_model(ModelOptions(name, quant=quant))
        assert served.quant == quant
    assert asked == [("other", Quant.NONE), ("other", Quant.INT8), ("other", Quant.INT4)]
    assert mesh.editor.stop_model("other") == f"other@{OTHER.precision}"
    assert mesh.editor.stop_model("other") == "other@int8"
    assert mesh.editor.stop_model("other") == "other"


async def test_the_context_of_a_further_model_is_not_above_its_own() -> None:
    mesh = FakeMesh()

    for context in (LONGEST, 64, OWN_CONTEXT - 1, LONGEST):
        served = await mesh.editor.serve_model(ModelOptions("other", context=context))
        assert served.shape.context == min(context, OWN_CONTEXT)


async def test_a_change_that_the_mesh_does_not_take_is_an_error() -> None:
    mesh = FakeMesh()
    mesh.takes = False

    with pytest.raises(MeshError, match="cannot store the change of `model"):
        await mesh.editor.serve_model(ModelOptions("other"))


async def test_an_unknown_quantisation_is_refused_before_the_model_is_read() -> None:
    with pytest.raises(UserError, match="Unknown quantisation `int3`"):
        await FakeMesh().editor.serve_model(ModelOptions("other", quant="int3"))


async def test_without_contact_nothing_is_changed() -> None:
    mesh = FakeMesh()
    mesh.charter = None

    with pytest.raises(LinkLost):
        mesh.editor.stop_model("other")


def test_layers_that_no_model_of_the_mesh_has_are_refused() -> None:
    layers = charter().shape.layers
    sizes = (1,) * (layers + 1)
    shape = replace(OTHER.shape, layer_bytes=sizes, kv_bytes_per_token=sizes)
    deep = replace(OTHER, shape=shape)
    mesh = FakeMesh(layers=Span(1, layers + 1))
    fits = FakeMesh(layers=Span(1, layers))

    with pytest.raises(UserError, match=f"layers `1:{layers + 1}` end above the {layers}") as error:
        mesh.editor.check_layers()

    assert error.value.hint == f"choose a span within `0:{layers}`"
    fits.editor.check_layers()
    mesh.charter = replace(charter(), models=(deep,))
    mesh.editor.check_layers()


async def test_names_are_resolved_once_their_nodes_are_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mesh = FakeMesh(exclude=("desk",))
    with caplog.at_level(logging.WARNING):
        mesh.editor.amend(LONGEST)
    assert "no node is named `desk` yet" in caplog.text

    mesh.know(A, "desk")
    mesh.editor.amend_again()

    assert mesh.charter is not None
    assert mesh.charter.exclude == (A,)


async def test_nodes_are_named_for_all_models_and_the_rest_for_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mesh = FakeMesh(entry=(show(A), "desk"), exclude=(show(B),), members=2, context=64)
    before = charter()

    with caplog.at_level(logging.WARNING):
        mesh.editor.amend_nodes()
        assert mesh.charter is not None
        assert (mesh.charter.entries, mesh.charter.exclude) == ((A,), (B,))
        assert (mesh.charter.members, mesh.charter.shape) == (before.members, before.shape)
        mesh.know(C, "desk")
        mesh.editor.amend_again()
        assert mesh.charter.entries == tuple(sorted((A, C)))
        assert mesh.charter.members == before.members
        mesh.editor.amend(LONGEST)

    assert (mesh.charter.members, mesh.charter.shape.context) == (2, 64)
    assert caplog.text.count("no node is named `desk` yet") == 1


async def test_a_name_of_several_nodes_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    mesh = FakeMesh(exclude=("desk",))
    mesh.know(A, "desk")
    mesh.know(B, "desk")

    with caplog.at_level(logging.WARNING):
        mesh.editor.amend(LONGEST)
        mesh.know(C, "attic")
        mesh.editor.amend_again()

    assert caplog.text.count("several nodes match `desk`") == 1
    assert mesh.editor.ambiguous == "several nodes match `desk`: give whole ids"
    assert mesh.charter is not None
    assert mesh.charter.exclude == ()


async def test_a_charter_that_the_mesh_does_not_take_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mesh = FakeMesh()
    mesh.takes = False

    with caplog.at_level(logging.WARNING):
        for replicas in (1, 2):
            mesh.editor.publish(replace(charter(), members=3, replicas=replicas))

    assert caplog.text.count("the mesh keeps its `members`") == 1
    assert caplog.text.count("the mesh keeps its `replicas`") == 1
