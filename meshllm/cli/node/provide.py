"""`meshllm provide`: a node that provides the models of an engine, such as vLLM or llama.cpp."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshllm.cli.node.node import Transports, run_node
from meshllm.cli.shared.options import takes
from meshllm.config import Scalar, load, state_path
from meshllm.errors import UserError

if TYPE_CHECKING:
    from meshllm.node.provider import Provider

EXAMPLES = """\b
Examples:
  meshllm provide --join meshllm1... -- vllm serve Qwen/Qwen3-8B --port {port}
  meshllm provide --join meshllm1... --url http://127.0.0.1:11434/v1
  meshllm provide --offer qwen=Qwen/Qwen3-8B -- transformers serve Qwen/Qwen3-8B --port {port}
  meshllm provide --url https://llm.example/v1 --key-env LLM_KEY --precision bf16
"""

SETTINGS = ("listen", "advertise", "relay", "join", "name", "trust", "state", "log_format")


@takes(*SETTINGS)
def provide(
    invocation: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND]...", help="Start this engine; `{port}` becomes a free port."
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Use the engine at this API.")
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option("--key-env", metavar="NAME", help="Variable with the key of the engine."),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision", metavar="TEXT", help="Precision of the models, if known: int4, bf16."
        ),
    ] = "",
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--offer",
            metavar="NAME[=MODEL]",
            help="Offer MODEL of the engine as NAME, instead of all that it lists; repeatable.",
        ),
    ] = None,
    transport: Transports = None,
    no_discovery: Annotated[
        bool, typer.Option("--no-discovery", help="Disable discovery on the local network.")
    ] = False,
    **flags: Scalar,
) -> None:
    """Provide the models of an engine with OpenAI's API to a mesh.

    The engine is vLLM, SGLang, llama.cpp, Ollama or any other; it is at `--url`, or started by
    COMMAND, watched, and started again if it ends. The models that it lists are served by every API
    server of the mesh, beside the model of the ring. Requests travel over the encrypted links of
    the mesh: the engine needs no open port. The node holds no layers.

    An engine that does not list its model, such as `transformers serve`, needs `--offer`, which can
    also shorten a name. While the engine does not answer, its models are not offered, and
    `meshllm ring status` of any node says why. The first Ctrl-C or SIGTERM finishes the requests,
    for a minute at most, leaves the mesh and stops the engine.
    """
    if bool(command) == bool(url):
        raise UserError(
            "`provide` needs either `--url` or a command",
            hint=f"such as `{EXAMPLES.splitlines()[2].strip()}`",
        )
    if url and not url.startswith(("http://", "https://")):
        raise UserError(f"`{url}` is not an HTTP URL", hint="such as http://127.0.0.1:11434/v1")
    if command and shutil.which(command[0]) is None:
        raise UserError(
            f"There is no command `{command[0]}`", hint="give its path, or check that it is in PATH"
        )
    key = os.environ.get(key_env or "", "")
    if key_env and not key:
        raise UserError(f"The variable `{key_env}` is not set", hint="export it with the key")
    _check_precision(precision)
    names = _names(models) if models else None
    discovery = False if no_discovery else None
    config = load({**flags, "transport": transport, "discovery": discovery})
    if config.settings.join is None:
        _check_member(state_path(config.settings))

    def make() -> "Provider":
        from meshllm.node.provider import EngineClient, EngineProcess, Provider

        process = EngineProcess(command) if command else None
        where = process.url if process else url or ""
        return Provider(EngineClient(where, key, precision, names), process)

    run_node(invocation, config, make_provider=make)


def _check_precision(text: str) -> None:
    from meshllm.protocol.membership.records import MAX_LABEL_BYTES

    if len(text.encode()) > MAX_LABEL_BYTES:
        raise UserError(f"`--precision` is longer than {MAX_LABEL_BYTES} bytes", hint="shorten it")


def _names(given: list[str]) -> dict[str, str]:
    """Return the engine's name for each model of `--offer`."""
    from meshllm.protocol.membership.records import MAX_OFFERS
    from meshllm.protocol.planning.plan import MAX_NAME_BYTES

    pairs = [each.partition("=") for each in given]
    names = {name: model if equals else name for name, equals, model in pairs}
    if len(given) > MAX_OFFERS or any(not (name and model) for name, model in names.items()):
        raise UserError(
            f"Invalid `--offer`: up to {MAX_OFFERS} of `NAME` or `NAME=MODEL`",
            hint="such as `--offer qwen=Qwen/Qwen3-8B`",
        )
    if long := [name for name in names if len(name.encode()) > MAX_NAME_BYTES]:
        raise UserError(f"`{long[0]}` is longer than {MAX_NAME_BYTES} bytes", hint="shorten it")
    return names


def _check_member(state: Path) -> None:
    """Raise `UserError` unless the node is a member of a mesh already."""
    from meshllm.node.membership.state_store import StateStore

    if StateStore.open(state).credential is None:
        raise UserError(
            "A provider joins a mesh", hint="give a ticket with `--join`, see `meshllm node`"
        )
