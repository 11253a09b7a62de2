"""`meshllm node`: runs a node until a signal or an error ends it."""

import logging
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshllm.cli.node.api_server import SETTINGS as API_SETTINGS
from meshllm.cli.node.api_server import announce, opened_api_server
from meshllm.cli.shared import complete
from meshllm.cli.shared.events import Notice, notices, without_progress
from meshllm.cli.shared.local import import_heavy
from meshllm.cli.shared.options import check_draft, inference_config, takes
from meshllm.cli.terminal import render
from meshllm.config import DEFAULT, TRANSPORTS, Config, Scalar, current, load, state_path
from meshllm.errors import MeshError, ModelMissing, UserError
from meshllm.local_files import hint_of, reason_of, replacing
from meshllm.log import event, setup
from meshllm.names import Span
from meshllm.units import listed, parse_duration

if TYPE_CHECKING:
    from meshllm.api.tcp import ApiServer
    from meshllm.node.control import NodeControl
    from meshllm.node.node import MeshNode
    from meshllm.node.options import NodeOptions
    from meshllm.node.provider import Provider
    from meshllm.status import MeshStatus, RingStatus

EXAMPLES = """\b
Examples:
  meshllm node --model Qwen/Qwen3-0.6B
  meshllm node --join meshllm1...
  meshllm node --memory 4GiB --name attic --listen ws://0.0.0.0:7700
  meshllm node --print-service > ~/.config/systemd/user/meshllm.service
"""

Transports = Annotated[
    str | None,
    typer.Option(
        "--transport",
        metavar="NAMES",
        help="Use these transports between nodes, comma-separated."
        f"  [default: {','.join(TRANSPORTS)}; env: MESHLLM_TRANSPORT]",
        autocompletion=complete.transports,
        show_default=False,
    ),
]

SWITCH_S = 0.0005  # s a thread may hold the GIL; the default delays a beat or a token by 5 ms

OPEN_FILES = 65_536  # connections, mostly; the usual limit of 1024 is for programs with select()
_POLL_S = 0.02
_GOING = frozenset({"leaving", "left", "down"})  # states of a node that leaves, seen from itself
_PASSED_ON = ("join", "name", "policy", "members", "replicas", "discovery", "context")
SETTINGS = (
    "model", "listen", "advertise", "relay", "join", "name", "memory", "layers", "policy",
    "members", "replicas", "auto", "keep", "exclude", "prefer", "entry", "trust", "dtype", "quant",
    "device", "threads", "speculation", "draft", "exact", "wire", "prefix_cache", "context",
    "state", "serve", *API_SETTINGS, "log_format",
)  # fmt: skip


@takes(*SETTINGS)
def node(
    invocation: typer.Context,
    transport: Transports = None,
    no_discovery: Annotated[
        bool, typer.Option("--no-discovery", help="Disable discovery on the local network.")
    ] = False,
    ticket_file: Annotated[
        Path | None,
        typer.Option("--ticket-file", metavar="FILE", help="Also write the ticket to FILE."),
    ] = None,
    print_service: Annotated[
        bool, typer.Option("--print-service", help="Print a systemd user unit and exit.")
    ] = False,
    **flags: Scalar,
) -> None:
    """Run a node that holds layers and serves requests.

    Without `--join` it returns to its last mesh, or founds one. `--model A,B` names the models that
    this node can hold; a new mesh serves the first of them. With `--auto`, or if no model is named,
    it holds layers of the model that lacks nodes most, if it is on this machine or another node can
    send it. A founder prints a ticket and the command for the next machine to stdout, unless it
    knows all `--members`; other nodes do with `--ticket-file`. The log goes to stderr. The first
    Ctrl-C or SIGTERM lets the other nodes take its layers over, finishes the requests of its
    clients, for a minute at most, and leaves the mesh; the second exits at once. The end of its
    terminal does the same as the first, unless `nohup` started it.
    """
    discovery = False if no_discovery else None
    config = load({**flags, "transport": transport, "discovery": discovery})
    for name in API_SETTINGS:
        if flags.get(name) is not None and config.settings.serve is None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"`{flag}` has no effect without `--serve`", hint="add `--serve HOST:PORT`"
            )
    if print_service:
        if ticket_file is not None:
            raise UserError(
                "`--ticket-file` cannot be combined with `--print-service`, which starts no node",
                hint="omit one of them",
            )
        print_unit(config)
        return
    run_node(invocation, config, ticket_file)


def run_node(
    invocation: typer.Context,
    config: Config,
    ticket_file: Path | None = None,
    make_provider: Callable[[], "Provider"] | None = None,
) -> None:
    """Run a node until it stops; one that provides an engine holds no layers."""
    set_up(invocation, config)
    options = _options(config)
    _check_early(options)
    if ticket_file is not None:
        _check_replaceable(ticket_file)
    if make_provider is None:
        _check_model(options)
    chosen = config.settings
    address = None if make_provider else chosen.serve  # `provide` has no such option
    notify = _log if chosen.log_format == "json" else _say
    with ExitStack() as stack:  # errors of an API server are shown before torch is loaded
        api_server = address and stack.enter_context(opened_api_server(chosen, address))
        if make_provider is None:
            with render.Status(sys.stderr) as status:
                status.show("loading torch")
                modules = "meshllm.node.preparation", "meshllm.node.ring.runtime"
                import_heavy(*modules, folder=options.state)
        _log_all()
        from meshllm.node import event_loop

        provider = make_provider() if make_provider else None
        event_loop.run(_run(options, notify, ticket_file, api_server or None, provider))


def set_up(invocation: typer.Context, config: Config) -> None:
    """Set up the log, in which errors are records from now on, and the limit of open files."""
    is_json = config.settings.log_format == "json"
    verbosity = invocation.find_root().params.get("verbose") or 0
    setup(max(verbosity, 1) if is_json else verbosity, json=is_json)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if 0 <= soft < more:  # infinity is negative
        with suppress(ValueError, OSError):  # macOS allows less than its hard limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


def _check_early(options: "NodeOptions") -> None:
    """Raise errors that can be found without torch; the node checks again."""
    from meshllm.node.membership.bootstrap import check_ticket
    from meshllm.node.membership.state_store import StateStore
    from meshllm.protocol.trust.ticket import parse_ticket

    if options.join is not None:
        parse_ticket(options.join)  # before anything is written
    store = StateStore.open(options.state)
    if options.join is not None:
        check_ticket(store, options.join)
    for address in options.listen:
        _check_host(address)
    for address in options.advertise:
        _check_dialable(address, options.transports)
    with store.locked():
        return


def _check_replaceable(path: Path) -> None:
    """Raise `UserError` for what a file must not replace, such as a device or a link to one."""
    try:
        has_folder = path.parent.is_dir()
        is_free = not path.is_symlink() and (path.is_file() or not path.exists())
    except OSError as error:
        text = f"`{path}` cannot be written: {reason_of(error)}"
        raise UserError(text, hint=hint_of(error)) from None
    if not has_folder:
        raise UserError(f"There is no folder `{path.parent}`", hint="create it, or check the path")
    if not is_free:
        raise UserError(f"`{path}` is not a regular file", hint="name a new file")


def _check_model(options: "NodeOptions") -> None:
    """Raise `ModelError` for a name of no model, and for one that a founder does not have.

    Other nodes of a mesh that exists may send a model that this machine lacks, and further models
    that are not here are left out.
    """
    from meshllm.model.locate import find_folder
    from meshllm.node.membership.state_store import StateStore

    if options.model is None:
        return
    try:
        find_folder(options.model)
    except ModelMissing:
        if options.join is None and StateStore.open(options.state).credential is None:
            raise


def _check_host(address: str) -> None:
    """Raise `UserError` for an address at which no node would dial this one: a path."""
    place = address.partition(":")[2].removeprefix("//").removesuffix("/")
    if "/" in place or "?" in place or ("/" in address and "://" not in address):
        raise UserError(
            f"Nodes do not dial an address such as `{address}`",
            hint="listen on `SCHEME://HOST:PORT`, or on `SCHEME:NAME`",
        )


def _check_dialable(address: str, transports: Sequence[str]) -> None:
    """Raise `UserError` for an address no transport can dial: it would end up in tickets."""
    from meshllm.node.net.endpoints import by_scheme, load_transports
    from meshllm.node.net.peer_address import LocalAddressPolicy, permitted

    loaded = load_transports(transports)
    schemes = by_scheme(loaded)
    if address.partition(":")[0] not in schemes:
        raise UserError(
            f"Invalid address `{address}` for {' or '.join(f'`{each.name}`' for each in loaded)}",
            hint=f"start `--advertise` with {' or '.join(f'`{each}:`' for each in schemes)}",
        )
    if not permitted([address], LocalAddressPolicy.YES):
        raise UserError(
            f"Address `{address}` has more than a host and a port: no node would dial it",
            hint="let a reverse proxy forward `/` of a host name to the node",
        )


def _log_all() -> None:
    """Route warnings and logs of other libraries to our handler."""
    logging.captureWarnings(True)
    library = logging.getLogger("transformers")  # it installs its own handler
    library.handlers.clear()
    library.propagate = True


async def _run(
    options: "NodeOptions",
    notify: Callable[[Notice], None],
    file: Path | None,
    api_server: "ApiServer | None",
    provider: "Provider | None",
) -> None:
    import asyncio

    from meshllm.api.access.accounts import Accounts
    from meshllm.api.access.revocations import share_revocations
    from meshllm.api.serve import serve
    from meshllm.api.unix import SOCKET, is_answered
    from meshllm.cli.shared.signals import draining
    from meshllm.node.control import control_of
    from meshllm.node.node import open_node

    def leave() -> None:
        notify(Notice("leaving", "finishing requests, then leaving; Ctrl-C again exits at once"))
        opened.leave()

    sys.setswitchinterval(SWITCH_S)  # process-wide: only the node runs here
    with draining() as drain, Accounts.open(options.state) as accounts:
        drain.kill = provider.kill if provider else None
        async with (
            open_node(options, provider=provider) as opened,
            asyncio.TaskGroup() as group,
        ):
            drain.leave = leave
            control, socket = control_of(opened), options.state / SOCKET
            tasks = [group.create_task(serve(control, socket))]
            tasks.append(group.create_task(share_revocations(control, accounts)))
            while not is_answered(socket):  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(_POLL_S)
            if options.join is not None:
                await opened.wait_for_charter()
            if api_server is not None:
                announce(api_server, await control.models(), opened.first_model)
                tasks.append(group.create_task(api_server.serve(control)))
            if provider is None:
                ticket = await _invite(opened, notify, file)
                if options.relays and ticket:
                    again = _print_with_relay(control, ticket, notify, file)
                    tasks.append(group.create_task(again))
            else:
                notify(Notice("ready", f"waiting for the engine at {provider.engine.url}"))
            report = _report(control, notify, has_layers=provider is None)
            tasks.append(group.create_task(report))
            await opened.stopped
            for task in tasks:
                task.cancel()


async def _report(
    node: "NodeControl", notify: Callable[[Notice], None], *, has_layers: bool = True
) -> None:
    """Report changes until the node leaves; on a terminal, show what the ring waits for.

    A node that leaves loses its links and its ring, which would read as faults; and what a ring
    waits for does not concern a node without layers.
    """
    import asyncio

    from meshllm.cli.ring.status import clean

    before: MeshStatus | None = None
    loop = asyncio.get_running_loop()
    reason, since = "", loop.time()
    with render.Status(sys.stderr) as line:
        async with aclosing(node.events()) as events:
            while True:
                after = clean(node.status_now())
                line.clear()
                if any(each.is_self and each.state in _GOING for each in after.nodes):
                    return
                for each in notices(before, after):
                    is_of_layers = each.event == "waiting" or each.fields.get("node") == after.node
                    if has_layers or not is_of_layers:
                        notify(each)
                before = after
                if (awaited := without_progress(after.ring.reason)) != reason:
                    reason, since = awaited, loop.time()
                shows = _show_waiting(line, after.ring, since) if has_layers else asyncio.sleep(0)
                waiting = asyncio.ensure_future(shows)
                try:
                    if await anext(events, None) is None:
                        return
                finally:
                    waiting.cancel()
                    await asyncio.wait([waiting])


async def _show_waiting(line: render.Status, ring: "RingStatus", since: float) -> None:
    """Show every second what the ring waits for, and for how long, until it serves."""
    import asyncio

    while ring.state != "serving":
        await asyncio.sleep(1)
        waited = int(asyncio.get_running_loop().time() - since)
        line.show(ring.reason or ring.state, f" (waited {waited} s)")


async def _invite(opened: "MeshNode", notify: Callable[[Notice], None], file: Path | None) -> str:
    """Print a ticket if a file is to get one, or a founder lacks nodes; return it, or nothing.

    Of nodes that join at the same time, none knows the others, so each would print one.
    """
    count = opened.ticket_uses
    if file is None and not (count and opened.is_founder):
        has = "the mesh has as many members as requested" if not count else "joined the mesh"
        text = f"{has}; `meshllm ring ticket` makes a ticket for another node"
        notify(Notice("ready", text))
        return ""
    ticket = await opened.create_ticket()
    more = f"{count} more machines" if count > 1 else "1 more machine"
    if file is not None:
        _write_private(file, f"{ticket}\n")
    notify(Notice("ready", f"ticket for {more}, and the command:"))
    try:
        _put_ticket(ticket)
    except MeshError as error:
        notify(_unprinted("the ticket", error))
    return ticket


def _lines_of(ticket: str) -> str:
    """Return what stdout gets of a ticket, in one write: its reader may stop early."""
    return f"{ticket}\nmeshllm node --join {ticket}\n"


async def _print_with_relay(
    node: "NodeControl", ticket: str, notify: Callable[[Notice], None], file: Path | None
) -> None:
    """Print the ticket again once a relay has answered, if it lacks the address there.

    The node serves by then: it does not end because nobody takes the ticket any more.
    """
    from meshllm.protocol.trust.ticket import MAX_ADDRESSES, parse_ticket

    printed = parse_ticket(ticket)
    if any(map(_is_relayed, printed.addresses)):
        return
    async with aclosing(node.events()) as events:
        async for _ in events:
            addresses = node.status_now().listening[:MAX_ADDRESSES]
            if any(map(_is_relayed, addresses)):
                again = replace(printed, addresses=addresses).encode()
                try:
                    _print_again(again, notify, file)
                except MeshError as error:
                    notify(_unprinted("the ticket with the address of the relay", error))
                return


def _print_again(ticket: str, notify: Callable[[Notice], None], file: Path | None) -> None:
    if file is not None:
        _write_private(file, f"{ticket}\n")
    text = "the relay has answered: this ticket, the same one, also leads there:"
    notify(Notice("ticket", text))
    _put_ticket(ticket)


def _put_ticket(ticket: str) -> None:
    try:
        render.put(_lines_of(ticket))
    except OSError as error:
        raise MeshError(f"stdout cannot be written: {reason_of(error)}") from None


def _unprinted(what: str, error: MeshError) -> Notice:
    text = f"{what} was not printed: {error}; `meshllm ring ticket` prints one"
    return Notice("unprinted", text)


def _is_relayed(address: str) -> bool:
    """Return whether an address is that of a relay, which names the node: `quic://NODE@HOST`."""
    return "@" in address


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, replacing an older one."""
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UserError(
            f"`{path}` cannot be written: {error.strerror}", hint=hint_of(error)
        ) from None


def _say(notice: Notice) -> None:
    render.print_message(f"{datetime.now().astimezone():%H:%M:%S} {notice.text}")


def _log(notice: Notice) -> None:
    event("mesh", event=notice.event, **notice.fields)


def _options(config: Config) -> "NodeOptions":
    """Return the options of the node; a setting left at its default is left to the mesh."""
    from meshllm.node.options import NodeOptions

    chosen = config.settings
    check_draft(chosen)
    given: dict[str, Any] = {
        name: current(chosen, name) for name in _PASSED_ON if config.origins[name] != DEFAULT
    }
    if chosen.auto and config.origins["model"] == "--model":
        raise UserError(
            "`--auto` cannot be combined with `--model`, which names what this node can hold",
            hint="omit one of them",
        )
    named = config.origins["model"] != DEFAULT and not chosen.auto
    model, *more = (listed(chosen.model) or (chosen.model,)) if named else (None,)
    return NodeOptions(
        state=state_path(chosen),
        model=model,
        more_models=tuple(more),
        inference=inference_config(chosen, of_mesh=config.origins["quant"] == DEFAULT),
        layers=None if chosen.layers is None else Span.parse(chosen.layers),
        transports=transports_of(config),
        listen=listed(chosen.listen) or (),
        advertise=listed(chosen.advertise) or (),
        relays=listed(chosen.relay) or (),
        exclude=listed(chosen.exclude),
        prefer=listed(chosen.prefer),
        entry=listed(chosen.entry),
        trust=listed(chosen.trust),
        keep_s=parse_duration(chosen.keep),
        **given,
    )


def transports_of(config: Config) -> tuple[str, ...]:
    """Return the transports of a node that are named; none is the default ones."""
    if config.origins["transport"] == DEFAULT:
        return ()
    return listed(config.settings.transport) or ()


def print_unit(config: Config) -> None:
    """Print a systemd unit of a node with these settings; raise `UserError` if they are invalid."""
    from meshllm.cli.node.systemd import command, unit

    _options(config)
    unused = {"model"} if config.settings.auto else set[str]()  # holds whatever `model` says
    names = (each for each in ("transport", *SETTINGS, "discovery") if each not in unused)
    render.out(unit(command(config, names)), end="")
    if config.settings.join is not None:
        render.print_message(
            "the unit contains no ticket: join once by hand, then start the service"
        )
