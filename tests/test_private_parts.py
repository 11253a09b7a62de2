"""The private parts of dependencies that are imported, by module; a new one needs a reason.

A release of a dependency may change them without notice. Each is tested by the tests of its module,
so that an update which changes one is a failed test. Private attributes of objects are not listed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OWN = {"meshllm", "meshllm_loopback", "meshllm_quic", "meshllm_websocket", "__future__"}

KNOWN = {
    "meshllm/cli/shared/signals.py": {"os._exit"},
    "meshllm/model/modules/kernel_choice.py": {
        "torch.ops.mkldnn._linear_pointwise",
        "torch.ops.mkldnn._reorder_linear_weight",
    },
    "meshllm/model/modules/linear_onednn.py": {
        "torch.ops.mkldnn._linear_pointwise",
        "torch.ops.mkldnn._reorder_linear_weight",
    },
    "meshllm/model/split/meta_model.py": {"transformers.models.auto.auto_factory._get_model_class"},
    "meshllm/model/steps/cuda_graph.py": {
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._pytree.tree_leaves",
    },
    "meshllm/model/steps/trace.py": {"torch.utils._python_dispatch.TorchDispatchMode"},
    "plugins/meshllm_quic/link/admission.py": {"aioquic._buffer.Buffer"},
}


def private_parts(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of other packages that a module imports or reads from them."""
    packages = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{each.name}" for each in names)
            case ast.Import(names=names):
                yield from (each.name for each in names)
                packages |= {each.asname or each.name for each in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            name = ast.unparse(node)
            if name.partition(".")[0] in packages:
                yield name


def is_private(name: str) -> bool:
    package, *parts = name.split(".")
    hidden = (part.startswith("_") and not part.startswith("__") for part in parts)
    return package not in OWN and any(hidden)


def test_private_parts_of_dependencies_are_imported_where_they_are_known() -> None:
    found = {
        str(path.relative_to(ROOT)): {
            name for name in private_parts(ast.parse(path.read_text("utf-8"))) if is_private(name)
        }
        for folder in ("meshllm", "plugins")
        for path in (ROOT / folder).rglob("*.py")
    }

    assert {path: names for path, names in found.items() if names} == KNOWN


def test_every_way_of_reaching_a_private_part_is_found() -> None:
    text = "import a._b\nfrom c._d import e\nfrom f import _g\nimport h\nh.i._j()\nk._l\n"

    found = {name for name in private_parts(ast.parse(text)) if is_private(name)}

    assert found == {"a._b", "c._d.e", "f._g", "h.i._j"}
