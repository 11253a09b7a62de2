"""`meshllm model serve|stop`: the models that the mesh of the running node serves."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshllm.cli.ring.plan import find_placement
from meshllm.cli.shared import complete
from meshllm.cli.shared.local import absolute_model
from meshllm.cli.shared.options import Json, settings, takes
from meshllm.cli.terminal import render
from meshllm.config import DEFAULT, Scalar, Settings, current, files, load
from meshllm.errors import UserError

if TYPE_CHECKING:
    from meshllm.cli.shared.client import NodeClient
    from meshllm.node.options import ModelOptions
    from meshllm.status import ModelStatus

EXAMPLES = """\b
Examples:
  meshllm model serve Qwen/Qwen3-0.6B
  meshllm model serve Qwen/Qwen3-0.6B --replicas 2 --alias small
  meshllm model serve /models/qwen --quant int8 --members 3
  meshllm model serve --plan office.toml
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
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Use `builtin`, a folder, or a Hugging Face name.",
            autocompletion=complete.models,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Serve the models of a workload, in as many rings as suit it best."
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME", help="Answer requests for this name too."),
    ] = None,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Serve a model in the mesh of the running node.

    The node of this machine must have the model; other nodes hold layers of it if their `--model`
    names it, or, without `--model`, if it is in their Hugging Face cache or another node can send
    it. Nodes that no ring needs form its ring. Options are flags or variables: lines of
    `config.toml` are about the node of this machine. The options of a model that is served already
    are changed; with another `--quant` it is served in both, see `meshllm help concepts`.

    `--plan` takes the file of `meshllm ring plan --workload`. It serves each model of the best
    placement with its number of rings, and of machines in a ring; the mesh chooses the machines. It
    leaves engines, and other models of the mesh, as they are.
    """
    import asyncio

    from meshllm.cli.shared.client import NodeClient, socket_path
    from meshllm.node.options import ModelOptions
    from meshllm.status import to_json

    config = load(flags)
    chosen, sources = config.settings, config.origins
    in_files = {DEFAULT, *map(str, files())}  # settings of files are those of this machine's node
    given = {name: current(chosen, name) for name in flags if sources[name] not in in_files}
    given.pop("state", None)
    is_flag = any(value is not None for name, value in flags.items() if name != "state")
    if (model is None) is (plan is None) or (plan and (is_flag or alias)):
        raise UserError(
            "`meshllm model serve` takes a model with its options, or `--plan FILE` alone",
            hint="such as `meshllm model serve Qwen/Qwen3-0.6B`",
        )
    client = NodeClient(socket_path(chosen))
    if plan is not None:
        _serve_planned(client, _planned(plan, chosen), as_json=as_json)
        return
    asked = ModelOptions(
        absolute_model(model or ""),
        aliases=None if alias is None else tuple(alias),
        **given,  # type: ignore[arg-type]  # of the types of the settings
    )
    served = asyncio.run(client.serve(asked))
    if as_json:
        render.dump(to_json(served))
    else:
        _tell(served)


def _serve_planned(
    client: "NodeClient", planned: "Sequence[ModelOptions]", *, as_json: bool
) -> None:
    """Serve several models, and tell of each as it is served, or of all in one JSON object."""
    import asyncio

    from meshllm.status import to_json

    found = []
    try:
        for each in planned:
            served = asyncio.run(client.serve(each))
            found.append(to_json(served))
            if not as_json:
                _tell(served)
    finally:
        if as_json and found:
            render.dump({"models": found})


def _tell(served: "ModelStatus") -> None:
    render.out(served.name)
    rings = "a ring" if served.replicas == 1 else f"up to {served.replicas} rings, each"
    layers = f"all {served.layers} layers"
    render.print_message(f"served by {rings} with {layers}; see `meshllm ring status`")


@takes("state")
def stop(model: Model, as_json: Json = False, **flags: Scalar) -> None:
    """Stop serving a model in the mesh of the running node.

    Its nodes take part in the rings of other models. The first model of a mesh is always served.
    """
    import asyncio

    from meshllm.cli.shared.client import NodeClient, socket_path

    stopped = asyncio.run(NodeClient(socket_path(settings(flags))).stop(absolute_model(model)))
    if as_json:
        render.dump({"model": stopped})
        return
    render.print_message(f"{render.one_line(stopped)} is no longer served")


def _planned(path: Path, chosen: Settings) -> "list[ModelOptions]":
    """Return how to serve the models of the best placement for a workload."""
    from meshllm.node.options import ModelOptions

    rings = find_placement(path, None, chosen).rings()
    if not rings:
        raise UserError("The best placement has no ring of nodes", hint="see `meshllm ring plan`")
    return [
        ModelOptions(
            absolute_model(name),
            quant=str(quant),
            members=max(sizes, key=lambda size: (sizes.count(size), size)),
            replicas=len(sizes),
        )
        for (name, quant), sizes in rings.items()
    ]
