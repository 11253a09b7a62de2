"""`meshllm id`: the identity of this node."""

from meshllm.cli.shared.options import Json, settings, takes
from meshllm.cli.terminal import render
from meshllm.config import Scalar, state_path

EXAMPLES = """\b
Examples:
  meshllm id
  meshllm id --json
"""


@takes("state")
def identity(as_json: Json = False, **flags: Scalar) -> None:
    """Print the id of this node.

    The id is the public half of a key that is created on first use and never leaves the state
    folder. stdout is the id; its short form, for display only, goes to stderr.
    """
    from meshllm.names import short, show
    from meshllm.node.membership.state_store import StateStore

    store = StateStore.open(state_path(settings(flags)))
    node = store.key.node
    if as_json:
        mesh = store.mesh.hex() if store.mesh else None
        render.dump({"node": show(node), "short": short(node), "mesh": mesh})
        return
    render.out(show(node))
    render.print_message(render.dim(f"short form {short(node)}, key in {store.folder}"))
