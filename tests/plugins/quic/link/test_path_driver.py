import asyncio

from meshllm.transport.contract import Path
from meshllm_quic.link.endpoint import HOST_PROBES
from meshllm_quic.link.path_driver import PathDriver
from meshllm_quic.wire.lanes import OFFER
from meshllm_quic.wire.offer import MAX_CANDIDATES, CandidateOffer
from meshllm_quic.wire.routes import Direct
from tests.plugins.quic.world import echo, relayed
from tests.simulation.ears import ear, virtual


@virtual
async def test_a_path_key_shared_by_many_links_is_answered_once() -> None:
    async with relayed("none", "none") as nodes:
        await nodes.until(Path.DIRECT)
        endpoint = nodes.transports[1]._endpoint
        assert endpoint is not None
        (connection,) = endpoint.table
        path_driver = connection.path_driver
        assert isinstance(path_driver, PathDriver)
        assert path_driver.paths is not None

        for _ in range(50):
            endpoint.watch_path(path_driver.paths.id, path_driver)

        assert endpoint._paths == {path_driver.paths.id: [path_driver]}


@virtual
async def test_offers_of_many_links_do_not_flood_a_third_party() -> None:
    async with relayed("none", "none") as nodes:
        victim = await ear(nodes.internet.host("victim"))
        links, named = 40, [(victim.address[0], port) for port in range(1, MAX_CANDIDATES)]
        listening = nodes.transports[1]._endpoint
        assert listening is not None
        (connection,) = listening.table
        path_drivers = [PathDriver(listening, connection) for _ in range(links)]
        before = nodes.internet.dropped["no socket"] + len(victim.heard)
        for number, path_driver in enumerate(path_drivers):
            path_driver.is_authenticated = True
            path_driver.receive_record(
                OFFER, CandidateOffer(bytes([number]) * 32, (victim.address, *named)).encode()
            )

        for _ in range(500):
            await asyncio.sleep(0.02)
            for path_driver in path_drivers:
                path_driver.expire(asyncio.get_running_loop().time())

        probes = nodes.internet.dropped["no socket"] + len(victim.heard) - before
        assert links < probes <= HOST_PROBES * (4 + 10) + 1
        assert connection.route != Direct(victim.address)
        await echo(nodes.one, nodes.other)
