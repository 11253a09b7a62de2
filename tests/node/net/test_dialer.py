"""The first address to answer wins, and no link of the others is left."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from meshllm.errors import LinkLost, MeshError, NotAuthorised, UserError
from meshllm.names import NodeId
from meshllm.node.net.dialer import DIAL_S, MAX_NAMES, MAX_TRIED, STAGGER_S, NodeDialer
from meshllm.node.net.peer_address import DialTarget, LocalAddressPolicy
from meshllm.node.net.secure import HandshakeClosed, SecureLink, secure_accept
from meshllm.protocol.membership.dial_limit import BURST, PORTS
from meshllm.protocol.trust.credential import Credential
from meshllm.protocol.trust.handshake import LocalIdentity, Purpose
from meshllm.protocol.trust.ticket import TicketProof
from meshllm.testing.clock import run_virtual
from meshllm.transport.contract import Link, Listener
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.handshakes import AS_HOST, AS_MEMBER, GUEST, HOST, NOBODY, OTHER


class Open:
    """Admits all peers, or none."""

    refusal: NotAuthorised | None = None
    removals = NOBODY

    async def refresh(self) -> None:
        """Do nothing."""

    def guests(self) -> tuple[bytes, ...]:
        return ()

    async def authorize(
        self, peer: NodeId, proof: Credential | TicketProof, purpose: Purpose, instance: int
    ) -> Credential:
        if self.refusal or not isinstance(proof, Credential):
            raise self.refusal or NotAuthorised("no")
        return proof


class Net:
    """A loopback network that records the dialled addresses."""

    name: ClassVar[str] = "loopback"
    schemes: ClassVar[tuple[str, ...]] = ("loopback",)

    def __init__(self) -> None:
        self.loopback = LoopbackTransport(TrafficShape(delay_s=0.01))
        self.dialled: list[tuple[float, str]] = []
        self.links: list[Link] = []
        self.accepted: list[SecureLink] = []
        self.gate = Open()

    def listen(self, address: str | None = None) -> Any:
        return self.loopback.listen(address)

    async def dial(self, address: str) -> Link:
        self.dialled.append((asyncio.get_running_loop().time(), address))
        link = await self.loopback.dial(address)
        self.links.append(link)
        return link

    @asynccontextmanager
    async def host(
        self, name: str, own: LocalIdentity = AS_HOST, wait_s: float = 0.0
    ) -> AsyncIterator[None]:
        """Answer at an address after some time; None is never."""

        async def serve(listener: Listener) -> None:
            async for link in listener.links():
                await asyncio.sleep(wait_s)
                try:
                    self.accepted.append(await secure_accept(link, own, self.gate))
                except MeshError:
                    continue

        async with self.listen(f"loopback:{name}") as listener:
            serving = asyncio.ensure_future(serve(listener))
            try:
                yield
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    async def reach(self, *names: str, expect: NodeId = HOST.node) -> SecureLink:
        dialer = NodeDialer({"loopback": self}, AS_MEMBER)
        addresses = [name if ":" in name else f"loopback:{name}" for name in names]
        return await dialer.dial(addresses, Purpose.MESH, expect=expect, removals=NOBODY)

    async def open_links(self) -> int:
        """Count the links that were dialled and not closed on this side."""
        count = 0
        for link in self.links:
            try:
                await link.send([b"?"])
                count += 1
            except LinkLost:
                continue
        return count


def run(scenario: Callable[[Net], Coroutine[Any, Any, None]]) -> Net:
    async def main() -> Net:
        net = Net()
        await scenario(net)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return net

    return run_virtual(main())


def test_an_address_of_this_machine_is_dialled_only_if_it_may_be() -> None:
    async def scenario(net: Net) -> None:
        dialer = NodeDialer({"ws": net}, AS_MEMBER)
        for local in (LocalAddressPolicy.NO, LocalAddressPolicy.YES):
            with pytest.raises(LinkLost):
                await dialer.dial(
                    ["ws://127.0.0.1:1", "ws://10.0.0.1:1/path"],
                    Purpose.MESH,
                    expect=HOST.node,
                    removals=NOBODY,
                    local=local,
                )

    assert [address for _, address in run(scenario).dialled] == ["ws://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("local", "most"), [(LocalAddressPolicy.HERE, BURST), (LocalAddressPolicy.YES, 2 * BURST)]
)
def test_an_address_of_this_machine_that_a_node_here_told_is_dialled_a_few_times(
    local: LocalAddressPolicy, most: int
) -> None:
    async def scenario(net: Net) -> None:
        dialer = NodeDialer({"ws": net}, AS_MEMBER)
        for _ in range(2 * BURST):
            with pytest.raises(LinkLost):
                await dialer.dial(
                    ["ws://127.0.0.1:1"],
                    Purpose.MESH,
                    expect=HOST.node,
                    removals=NOBODY,
                    local=local,
                )

    assert [address for _, address in run(scenario).dialled] == ["ws://127.0.0.1:1"] * most


def test_a_silent_target_is_not_dialled_without_end() -> None:
    async def scenario(net: Net) -> None:
        dialer = NodeDialer({"loopback": net}, AS_MEMBER)
        for _ in range(2 * BURST):
            with pytest.raises(LinkLost):
                await dialer.dial(
                    ["loopback:void"], Purpose.MESH, expect=HOST.node, removals=NOBODY
                )

        with pytest.raises(LinkLost, match="`loopback:void` so far: the next attempt is delayed"):
            await dialer.dial(["loopback:void"], Purpose.MESH, expect=HOST.node, removals=NOBODY)

    assert len(run(scenario).dialled) == BURST


def test_an_address_that_was_not_needed_is_not_counted_as_tried() -> None:
    async def scenario(net: Net) -> None:
        dialer = NodeDialer({"loopback": net}, AS_MEMBER)

        async def dial(*addresses: str) -> SecureLink:
            return await dialer.dial(addresses, Purpose.MESH, expect=HOST.node, removals=NOBODY)

        async with net.host("a"):
            for _ in range(2 * BURST):
                await dial("loopback:a", "loopback:b")
        async with net.host("b"):
            assert (await dial("loopback:b")).peer == HOST.node

    run(scenario)


def test_dials_at_the_same_time_share_the_attempts_at_a_host() -> None:
    async def scenario(net: Net) -> None:
        dialer = NodeDialer({"ws": net}, AS_MEMBER)

        async def dial(first: int) -> None:
            addresses = [f"ws://10.0.0.8:{first + at}" for at in range(MAX_TRIED)]
            with pytest.raises(LinkLost, match="the next attempt is delayed"):
                await dialer.dial(addresses, Purpose.MESH, expect=HOST.node, removals=NOBODY)

        await asyncio.gather(dial(1), dial(1 + MAX_TRIED))

    assert BURST * PORTS <= len(run(scenario).dialled) < MAX_TRIED + BURST


def test_a_node_that_was_away_for_long_is_dialled_as_soon_as_it_is_back() -> None:
    async def scenario(net: Net) -> None:
        dialer = NodeDialer({"loopback": net}, AS_MEMBER)

        async def dial() -> SecureLink:
            return await dialer.dial(
                ["loopback:a"], Purpose.MESH, expect=HOST.node, removals=NOBODY
            )

        async with net.host("a"):
            await dial()
        for _ in range(2 * BURST):
            with pytest.raises(LinkLost):
                await dial()
        async with net.host("a"):
            assert (await dial()).peer == HOST.node

    run(scenario)


def test_the_first_to_answer_wins() -> None:
    async def scenario(net: Net) -> None:
        async with net.host("a"), net.host("b"):
            link = await net.reach("a", "b")
            assert link.address == "loopback:a"
            assert net.accepted[0].address == ""
            assert (link.peer, link.purpose) == (HOST.node, Purpose.MESH)
            await asyncio.sleep(1)
            assert await net.open_links() == 1

    net = run(scenario)
    assert [address for _, address in net.dialled] == ["loopback:a"]


def test_a_dead_address_is_skipped() -> None:
    async def scenario(net: Net) -> None:
        async with net.host("b"):
            assert (await net.reach("a", "b")).peer == HOST.node

    net = run(scenario)
    assert net.dialled == [(0.0, "loopback:a"), (STAGGER_S, "loopback:b")]


def test_a_silent_address_is_cancelled_and_closed() -> None:
    async def scenario(net: Net) -> None:
        async with net.listen("loopback:a"), net.host("b"):
            assert (await net.reach("a", "b")).peer == HOST.node
            assert asyncio.get_running_loop().time() < 2 * STAGGER_S
            assert (len(net.links), await net.open_links()) == (2, 1)

    run(scenario)


def test_of_two_that_answer_at_once_one_is_closed() -> None:
    async def scenario(net: Net) -> None:
        async with net.host("a", wait_s=STAGGER_S), net.host("b"):
            await net.reach("a", "b")
            await asyncio.sleep(1)
            assert (len(net.links), await net.open_links()) == (2, 1)

    run(scenario)


def test_all_dead_is_one_error() -> None:
    async def scenario(net: Net) -> None:
        with pytest.raises(LinkLost, match="Cannot reach the node: No listener at"):
            await net.reach("a", "b", "c")

    assert len(run(scenario).dialled) == 3


def test_silence_ends_at_the_timeout() -> None:
    async def scenario(net: Net) -> None:
        async with net.listen("loopback:a"), net.listen("loopback:b"):
            with pytest.raises(LinkLost, match=f"No answer within {DIAL_S:.0f} s"):
                await net.reach("a", "b")
            assert asyncio.get_running_loop().time() == DIAL_S
            assert await net.open_links() == 0

    run(scenario)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("b", "a", "c")])
def test_a_rejection_is_reported_before_silence(names: tuple[str, ...]) -> None:
    async def scenario(net: Net) -> None:
        net.gate.refusal = NotAuthorised("it was removed")
        async with net.host("a"):
            with pytest.raises(NotAuthorised, match="it was removed"):
                await net.reach(*names)

    run(scenario)


def test_another_node_at_the_first_address_does_not_block_the_others() -> None:
    async def scenario(net: Net) -> None:
        async with net.host("a", replace(AS_HOST, key=OTHER)), net.host("b"):
            assert (await net.reach("a", "b")).peer == HOST.node
            with pytest.raises(HandshakeClosed):
                await net.reach("a")

    run(scenario)


@pytest.mark.parametrize(
    ("addresses", "is_told"),
    [
        (["ws://127.0.0.1:1"], True),
        (["ws://127.0.0.1:1", "ws://10.0.0.1:1"], False),
        (["ws://127.0.0.1:2", "ws://10.0.0.1:2"], True),
    ],
)
def test_a_node_of_this_machine_does_not_answer_for_one_elsewhere(
    addresses: list[str], is_told: bool
) -> None:
    class Away(Net):
        async def dial(self, address: str) -> Link:
            if address == "ws://10.0.0.1:1":
                raise LinkLost("no answer")
            return await super().dial("loopback:other")

    async def main() -> None:
        net = Away()
        async with net.host("other", AS_MEMBER):
            with pytest.raises(LinkLost) as caught:
                await NodeDialer({"ws": net}, AS_MEMBER).dial(
                    addresses,
                    Purpose.MESH,
                    expect=HOST.node,
                    removals=NOBODY,
                    local=LocalAddressPolicy.YES,
                )
        assert isinstance(caught.value, HandshakeClosed) is is_told

    run_virtual(main())


def test_a_long_list_costs_little() -> None:
    async def scenario(net: Net) -> None:
        with pytest.raises(LinkLost):
            await net.reach(*(f"x{number}" for number in range(10_000)))

    assert len(run(scenario).dialled) == MAX_TRIED


@pytest.mark.parametrize("odd", ["ws://10.0.0.1:7700", ":", "loopback:", "\x00:", "http:x"])
def test_an_invalid_address_does_not_block_the_others(odd: str) -> None:
    async def scenario(net: Net) -> None:
        async with net.host("b"):
            assert (await net.reach(odd, "b")).peer == HOST.node
        with pytest.raises(LinkLost):
            await net.reach(odd)

    run(scenario)


@pytest.mark.parametrize(
    ("names", "told"),
    [((), "it has none"), (("ws://a:1", "ftp:b"), "addresses: `ws://a:1`, `ftp:b`")],
)
def test_addresses_of_other_transports_are_named(names: tuple[str, ...], told: str) -> None:
    async def scenario(net: Net) -> None:
        with pytest.raises(LinkLost, match=told):
            await net.reach(*names)

    assert run(scenario).dialled == []


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, STAGGER_S, 2.0])
def test_a_cancelled_call_closes_everything(after_s: float) -> None:
    async def scenario(net: Net) -> None:
        async with net.listen("loopback:a"), net.listen("loopback:b"):
            reaching = asyncio.ensure_future(net.reach("a", "b"))
            await asyncio.sleep(after_s)
            reaching.cancel()
            await asyncio.wait([reaching])
            assert reaching.cancelled()
            await asyncio.sleep(1)
            assert await net.open_links() == 0

    run(scenario)


def test_a_call_that_is_cancelled_as_it_ends_leaves_no_link() -> None:
    async def main(steps: int) -> None:
        net = Net()
        net.loopback = LoopbackTransport()
        async with net.host("a"):
            reaching = asyncio.ensure_future(net.reach("a"))
            for _ in range(steps):
                await asyncio.sleep(0)
            reaching.cancel()
            await asyncio.wait([reaching])
            if reaching.cancelled():
                assert await net.open_links() == 0

    for steps in range(40):
        run_virtual(main(steps))


@pytest.mark.parametrize("kind", [ZeroDivisionError, MemoryError])
def test_a_bug_of_a_transport_does_not_block_the_others(
    caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    class Broken(Net):
        async def dial(self, address: str) -> Link:
            if address == "loopback:a":
                raise kind
            return await super().dial(address)

    async def main() -> None:
        net = Broken()
        async with net.host("b"):
            assert (await net.reach("a", "b")).peer == HOST.node
        with pytest.raises(LinkLost, match=kind.__name__):
            await net.reach("a")

    run_virtual(main())
    assert "bug in the transport" in caplog.text


async def test_an_address_without_transport_is_not_dialled() -> None:
    dialer = NodeDialer({}, AS_MEMBER)

    with pytest.raises(LinkLost, match="No transport for the address"):
        await dialer._dial_one(DialTarget("ws://x"), Purpose.MESH, GUEST.node, NOBODY)


async def test_a_name_that_tls_proves_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another look-up could give an address of an inner server, which was not checked."""
    answers = iter(["10.1.0.1"])

    def look_up(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (next(answers), 1))]

    class Tls(Net):
        async def dial_hosts(self, address: str, hosts: Sequence[str]) -> Link:
            asked.append((address, tuple(hosts)))
            raise LinkLost("Nobody is there")

    asked = list[tuple[str, tuple[str, ...]]]()
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    dialer = NodeDialer({"wss": Tls()}, AS_MEMBER)
    with pytest.raises(LinkLost, match="Nobody is there"):
        await dialer.dial(["wss://evil:1"], Purpose.MESH, expect=HOST.node, removals=NOBODY)
    assert asked == [("wss://evil:1", ("10.1.0.1",))]

    answers = iter(["10.1.0.1"])
    dialer = NodeDialer({"wss": Net()}, AS_MEMBER)
    with pytest.raises(LinkLost, match="cannot be told which hosts"):
        await dialer.dial(["wss://evil:1"], Purpose.MESH, expect=HOST.node, removals=NOBODY)


def test_an_address_that_cannot_be_dialled_is_not_an_error_of_the_user() -> None:
    async def scenario(net: Net) -> None:
        with pytest.raises(LinkLost) as raised:
            await net.reach("loopback:")
        assert not isinstance(raised.value, UserError)

    run(scenario)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("ws://host.example:1", r"Cannot look up `ws://host\.example:1`: .*not known"),
        ("ws://127.0.0.1:1", r"No address of the node may be dialled: `ws://127\.0\.0\.1:1`"),
    ],
)
async def test_the_reason_why_no_address_is_dialled_is_told(
    address: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    dialer = NodeDialer({"ws": Net()}, AS_MEMBER)

    with pytest.raises(LinkLost, match=told):
        await dialer.dial([address], Purpose.MESH, expect=HOST.node, removals=NOBODY)


def test_only_some_names_of_a_peer_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set[str]()

    def look_up(host: str, *_: object, **__: object) -> None:
        asked.add(host)
        raise OSError("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    async def scenario(net: Net) -> None:
        async with net.host("a"):
            assert await net.reach(*(f"loopback://host-{at}:1" for at in range(9)), "a")

    run(scenario)

    assert asked == {f"host-{at}" for at in range(MAX_NAMES)}
