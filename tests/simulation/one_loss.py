"""A schedule in which a ring loses one node."""

import asyncio
from collections.abc import Callable

from tests.simulation.schedule import Schedule
from tests.simulation.world import World


class OneLoss(Schedule):
    """Three nodes form a ring, and one of them is killed."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        world.capacity = dict.fromkeys(range(3), 2)
        world.policy = world.ring_size = world.exclude = world.prefer = None
        world.names, world.newcomers = {}, set()
        world.think_s = world.disk_s = world.network.jitter_s = 0.0
        world.network.delay_s.clear()
        self.took_s = 0.0
        """From the kill to the next ring."""

    async def run(self) -> None:
        world = self.world
        for number in range(3):
            world.start(number)
        await self._until(lambda: len(self._served()) == 2)  # a node has room for half of the model
        await asyncio.sleep(5.0)
        (lost, *_), start = self._served(), world.loop.time()
        world.crash(lost, silently=False)
        await self._until(lambda: len(self._served()) == 2 and lost not in self._served())
        self.took_s = world.loop.time() - start
        world.is_over = True
        for number in list(world.running):
            world.crash(number, silently=False)
        await asyncio.sleep(1.0)

    def _served(self) -> list[int]:
        """Return the nodes that are ranks of a ring."""
        return [number for number, node in self.world.nodes.items() if node.ring_member.rank]

    async def _until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not happened():  # noqa: ASYNC110  # virtual time
                await asyncio.sleep(0.01)
