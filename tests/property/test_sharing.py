"""Random meshes of several models, whose nodes take part in several rings: memory and stability."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from meshllm.protocol.agreement.grouping import shortage
from meshllm.protocol.agreement.groups import groups_of
from tests.builders.sharing import NODES, SharedMesh, served_model, shared_mesh


@st.composite
def meshes(draw: st.DrawFn) -> SharedMesh:
    count = draw(st.integers(1, len(NODES)))
    memory = {number: draw(st.integers(100, 1500)) for number in range(count)}
    models = [
        served_model(number, draw(st.integers(1, 8)), replicas, members, workspace)
        for number in range(draw(st.integers(1, 4)))
        for members in [draw(st.sampled_from((None, None, 2, 3)))]
        for replicas in [draw(st.sampled_from((1, 1, 2, 3)))]
        for workspace in [draw(st.sampled_from((0, 0, 40, 150)))]
    ]
    mesh = shared_mesh(memory, *models)
    speeds = st.sampled_from((0.005, 0.01, 0.01, 0.03))
    mesh.layer_s = {node: draw(speeds) for node in mesh.memory}
    turns = draw(st.sampled_from((None, None, *range(8))))
    mesh.turns = None if turns is None else Random(turns)
    return mesh


@given(meshes(), st.data())
@settings(max_examples=40, deadline=None)
def test_no_node_plans_more_than_it_offers_and_changes_end(
    mesh: SharedMesh, data: st.DataObject
) -> None:
    mesh.settle()
    served = mesh.served()
    for _ in range(3):
        keys = sorted(each.key for each in mesh.charter.served)
        mesh.used = tuple(each for each in keys if data.draw(st.booleans()))
        if len(mesh.memory) > 1 and data.draw(st.booleans()):
            mesh.lose(data.draw(st.sampled_from(sorted(mesh.memory))))
        mesh.settle()
        served |= mesh.served()
    lacking = shortage(mesh.view())
    for group in groups_of(mesh.charter):
        assert group.id in mesh.served() or group.id in lacking
        is_shared = any(group.id in part.further for part in mesh.parts.values())
        assert group.id in served or not is_shared  # no memory is given for nothing
    kept = mesh.served()
    mesh.end_idle_shares()
    mesh.settle()
    assert not kept < mesh.served()  # what a broken ring keeps, no other one lacks
