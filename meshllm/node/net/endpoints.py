"""The transports of a node and the addresses it listens on."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest

from meshllm.config import TRANSPORTS
from meshllm.errors import UserError
from meshllm.node.net.peer_address import own_host
from meshllm.node.options import NodeOptions
from meshllm.protocol.membership.records import MAX_ADDRESSES
from meshllm.protocol.trust.identity import NodeKey
from meshllm.transport.contract import (
    Listener,
    Network,
    NotifiesAddressChange,
    ReservesHandshakeSlots,
    SupportsIdentity,
    SupportsNatDetection,
    SupportsRelays,
    Transport,
)
from meshllm.transport.registry import Registry

MAX_RESERVED = 2  # hosts of one peer: one of each family, or of two networks


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The transports of a node and their listeners."""

    transports: tuple[Transport, ...]
    listeners: tuple[Listener, ...]
    advertised: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Current addresses of the node, most likely reachable first, transports interleaved."""
        rounds = zip_longest(*(listener.addresses for listener in self.listeners))
        found = (address for address in chain.from_iterable(rounds) if address is not None)
        return tuple(dict.fromkeys((*self.advertised, *found)))[:MAX_ADDRESSES]

    @property
    def schemes(self) -> Mapping[str, Transport]:
        """The transports by address scheme."""
        return by_scheme(self.transports)

    def survey(self) -> list[Network]:
        """Return what the transports have detected about the node's networks."""
        surveys = (
            each.survey() for each in self.transports if isinstance(each, SupportsNatDetection)
        )
        return [network for network in surveys if network is not None]

    def reserve(self, peers: Iterable[Sequence[str]]) -> None:
        """Keep places for peers at the addresses that they had in an earlier run.

        Each has its first one before any has another, and few in all, since peers choose their
        addresses.
        """
        hosts_of = (dict.fromkeys(filter(None, map(own_host, at))) for at in peers)
        rounds = chain.from_iterable(zip_longest(*([*each][:MAX_RESERVED] for each in hosts_of)))
        hosts = list(dict.fromkeys(host for host in rounds if host is not None))
        for listener in self.listeners:
            if isinstance(listener, ReservesHandshakeSlots):
                listener.reserve(hosts)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever `addresses` may have changed."""
        for listener in self.listeners:
            if isinstance(listener, NotifiesAddressChange):
                listener.on_change(callback)


def load_transports(names: Sequence[str]) -> tuple[Transport, ...]:
    """Load the named transports; without names the default ones, except those that are broken.

    Raises:
        PluginError: a named one is missing or broken, or each default one is.
    """
    registry = Registry.discover()
    return tuple(map(registry.load, names)) or registry.usable(TRANSPORTS)


def by_scheme(transports: Sequence[Transport]) -> dict[str, Transport]:
    """Map address schemes to transports."""
    return {scheme: transport for transport in transports for scheme in transport.schemes}


def prepare(transports: Sequence[Transport], key: NodeKey, relays: Sequence[str] = ()) -> None:
    """Configure the transports with the node's key and its relays.

    Raises:
        UserError: no transport supports relays, or the address of a relay is invalid.
    """
    for transport in transports:
        if isinstance(transport, SupportsIdentity):
            transport.identify(key.seed)
    for relay in relays:
        takers = [transport for transport in transports if isinstance(transport, SupportsRelays)]
        if not takers:
            names = ", ".join(f"`{transport.name}`" for transport in transports)
            raise UserError(
                f"Relay `{relay}` cannot be used: {names} does not support relays",
                hint="write `--transport websocket,quic`: QUIC does",
            )
        for transport in takers:
            transport.add_relay(relay)


@asynccontextmanager
async def open_endpoints(
    options: NodeOptions, key: NodeKey, given: Transport | None
) -> AsyncIterator[Endpoints]:
    """Listen with every transport of the options, or only with the ``given`` one.

    Raises:
        UserError: an address cannot be used.
        PluginError: a transport is missing or broken.
    """
    transports = (given,) if given else load_transports(options.transports)
    prepare(transports, key, options.relays)
    async with AsyncExitStack() as stack:
        listeners = [
            await stack.enter_async_context(transport.listen(address))
            for transport, address in assign_addresses(options.listen, transports)
        ]
        yield Endpoints(transports, tuple(listeners), options.advertise)


def assign_addresses(
    addresses: Sequence[str], transports: Sequence[Transport]
) -> list[tuple[Transport, str | None]]:
    """Assign listen addresses to transports; without addresses, each chooses its own.

    An address with a scheme is for that transport, one without for all. A transport without an
    address does not listen: an explicit interface excludes the others.

    Raises:
        UserError: an address has an unknown scheme, or a transport has two addresses.
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
                f"`{address}` is not an address of {names}",
                hint=f"addresses begin with {' or '.join(f'`{each}:`' for each in schemes)}",
            )
        for taker in takers:
            if taker.name in shares:
                other = shares[taker.name]
                raise UserError(f"`{other}` and `{address}` are both for `{taker.name}`")
            shares[taker.name] = address
    return [(each, shares[each.name]) for each in transports if each.name in shares]
