"""Where a node is reached, and by what it reaches others."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest

from meshllm.errors import UserError
from meshllm.node.options import NodeOptions
from meshllm.protocol.membership.records import MAX_ADDRESSES
from meshllm.protocol.trust.identity import NodeKey
from meshllm.transport.contract import (
    Identified,
    Listener,
    Moving,
    Network,
    Relaying,
    Surveying,
    Transport,
)
from meshllm.transport.registry import Registry


@dataclass(frozen=True, slots=True)
class Place:
    """The transports of a node, and where it listens with each."""

    transports: tuple[Transport, ...]
    listeners: tuple[Listener, ...]
    advertised: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach the node now, likeliest first, the transports by turns."""
        rounds = zip_longest(*(listener.addresses for listener in self.listeners))
        found = (address for address in chain.from_iterable(rounds) if address is not None)
        return tuple(dict.fromkeys((*self.advertised, *found)))[:MAX_ADDRESSES]

    @property
    def schemes(self) -> Mapping[str, Transport]:
        """The transports by the scheme of their addresses."""
        return by_scheme(self.transports)

    def survey(self) -> list[Network]:
        """Tell what the transports know of the networks around the node."""
        surveys = (each.survey() for each in self.transports if isinstance(each, Surveying))
        return [network for network in surveys if network is not None]

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call this whenever `addresses` may be others."""
        for listener in self.listeners:
            if isinstance(listener, Moving):
                listener.on_change(callback)


def by_scheme(transports: Sequence[Transport]) -> dict[str, Transport]:
    """Order transports by the scheme of their addresses."""
    return {scheme: transport for transport in transports for scheme in transport.schemes}


def prepare(transports: Sequence[Transport], key: NodeKey, relays: Sequence[str] = ()) -> None:
    """Tell the transports who this node is, and through which relays it is reached.

    Raises:
        UserError: no transport knows relays, or an address is none of a relay.
    """
    for transport in transports:
        if isinstance(transport, Identified):
            transport.identify(key.seed)
    for relay in relays:
        takers = [transport for transport in transports if isinstance(transport, Relaying)]
        if not takers:
            names = ", ".join(f"`{transport.name}`" for transport in transports)
            raise UserError(
                f"Relay `{relay}` is for a transport that knows relays, and {names} does not",
                hint="leave out `--transport`, or write `--transport websocket,quic`",
            )
        for transport in takers:
            transport.add_relay(relay)


@asynccontextmanager
async def open_place(
    options: NodeOptions, key: NodeKey, given: Transport | None = None
) -> AsyncIterator[Place]:
    """Listen with every transport that the options name, or with the one that is ``given``.

    Raises:
        UserError: an address cannot be used.
        PluginError: there is no such transport.
    """
    registry = Registry.discover()
    transports = (given,) if given else tuple(map(registry.load, options.transports))
    prepare(transports, key, options.relays)
    async with AsyncExitStack() as stack:
        listeners = [
            await stack.enter_async_context(transport.listen(address))
            for transport, address in share_out(options.listen, transports)
        ]
        yield Place(transports, tuple(listeners), options.advertise)


def share_out(
    addresses: Sequence[str], transports: Sequence[Transport]
) -> list[tuple[Transport, str | None]]:
    """Tell who listens, and where: all where they like when there are no addresses.

    Else one listens when an address is of its scheme, or of none: who names one interface means no
    other.

    Raises:
        UserError: an address is for none of them, or two are for the same one.
    """
    if not addresses:
        return [(transport, None) for transport in transports]
    shares: dict[str, str] = {}
    schemes = by_scheme(transports)
    for address in addresses:
        scheme, _, rest = address.partition(":")
        takers = [schemes[scheme]] if scheme in schemes else list(transports)
        if scheme not in schemes and rest.startswith("//"):
            names = ", ".join(f"`{transport.name}`" for transport in transports)
            raise UserError(
                f"`{address}` is no address of {names}",
                hint=f"addresses begin with {' or '.join(f'`{each}:`' for each in schemes)}",
            )
        for taker in takers:
            if taker.name in shares:
                other = shares[taker.name]
                raise UserError(f"`{other}` and `{address}` are both for `{taker.name}`")
            shares[taker.name] = address
    return [(each, shares[each.name]) for each in transports if each.name in shares]
