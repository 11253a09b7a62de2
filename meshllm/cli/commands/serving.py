"""`meshllm model serve|stop`: the models that the mesh of the running node serves."""

from pathlib import Path
from typing import Annotated

import typer

from meshllm.cli.shared import complete
from meshllm.cli.shared.options import Json, settings, takes
from meshllm.cli.terminal import render
from meshllm.config import Scalar

EXAMPLES = """\b
Examples:
  meshllm model serve Qwen/Qwen3-0.6B
  meshllm model serve Qwen/Qwen3-0.6B --replicas 2 --alias small
  meshllm model serve /models/qwen --quant int8 --members 3
  meshllm model stop Qwen/Qwen3-0.6B
"""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Use `builtin`, a folder, or a Hugging Face name.",
        autocompletion=complete.models,
    ),
]


@takes("quant", "policy", "members", "replicas", "context", "state")
def serve(
    model: Model,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME", help="Answer requests for this name too."),
    ] = None,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Serve a model in the mesh of the running node.

    The node of this machine must have the model; other nodes hold layers of it if they have it in
    their Hugging Face cache, or if their `--model` names it. Nodes that no ring needs form its
    ring. Options of a model that is served already are changed, without `--quant`.
    """
    import asyncio

    from meshllm.cli.shared.client import NodeClient, socket_path
    from meshllm.node.options import ModelOptions
    from meshllm.status import to_json

    chosen = settings(flags)
    given = {name: value for name, value in flags.items() if value is not None and name != "state"}
    asked = ModelOptions(
        _absolute(model),
        aliases=None if alias is None else tuple(alias),
        **given,  # type: ignore[arg-type]  # of the types of the settings
    )
    served = asyncio.run(NodeClient(socket_path(chosen)).serve(asked))
    if as_json:
        render.dump(to_json(served))
        return
    render.out(served.name)
    rings = "a ring" if served.replicas == 1 else f"up to {served.replicas} rings"
    render.talk(f"served by {rings} of {served.layers} layers; see `meshllm ring status`")


@takes("state")
def stop(model: Model, as_json: Json = False, **flags: Scalar) -> None:
    """Stop serving a model in the mesh of the running node.

    Its nodes take part in the rings of other models. The first model of a mesh is always served.
    """
    import asyncio

    from meshllm.cli.shared.client import NodeClient, socket_path

    asyncio.run(NodeClient(socket_path(settings(flags))).stop(_absolute(model)))
    if as_json:
        render.dump({"model": model})
        return
    render.talk(f"{model} is no longer served")


def _absolute(model: str) -> str:
    """Return the name of a model for a node, which runs in another folder."""
    folder = Path(model).expanduser()
    return str(folder.absolute()) if folder.is_dir() else model
