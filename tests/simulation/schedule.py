"""Faults of one simulated world and their times, determined by its seed."""

import asyncio
from collections.abc import Callable
from random import Random

from meshllm.node.agreement.plan_follower import SETTLE_S
from tests.simulation.checks import Checks
from tests.simulation.members import Ticket
from tests.simulation.world import TIMERS, World

BOUND = 120.0  # s from the last fault until all is well
LEAVE_S = 10.0  # s for all to leave
FRESH_S = 30.0  # s for one request to each of five nodes: ten trips of 0.6 s each, one by one
LOOK_S = 1.0
BEACON_S = 30.0  # s from the last fault until nodes learn all addresses, and again
TICKETS_S = (None, 3600.0, 1.5)  # s until a ticket expires: some are used too late
ROUGH = 8  # faults more, in some worlds
JUMPS_S = (1.0, 90.0, 3600.0, 3 * 86400.0)  # to both sides


class Schedule:
    """One world and its events."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.checks = Checks(world)
        self.random = random = world.random
        self.count = random.choice((2, 2, 3, 3, 3, 4, 5))
        capacities = (2, 2, 2, 3, 4)
        world.capacity = {number: random.choice(capacities) for number in range(self.count)}
        world.policy = random.choice((None, "fastest", "proportional", "throughput"))
        world.ring_size = random.choice((None, None, 2, 3))
        world.network.jitter_s = random.choice((0.0, 0.0, 0.002, 0.05))
        if random.random() < 0.3:
            for one in range(self.count):
                for other in range(self.count):
                    world.network.delay_s[one, other] = random.choice((0.001, 0.02, 0.1))
        self.people = people = Random(f"{seed} people")  # apart from the draws of the network
        self.has_jumps = people.random() < 0.4
        self.has_removal = people.random() < 0.4
        if people.random() < 0.4:
            world.newcomers = {each for each in range(1, self.count) if people.random() < 0.8}
        self.is_scarce = people.random() < 0.5
        self.is_rough = people.random() > 0.8
        self.bugs = Random(f"{seed} bugs")
        self.has_bug = self.has_hang = False
        if seed % 2 == 0:
            self._trouble(self.bugs)
        self.memory = Random(f"{seed} memory")
        self.has_shortage = self.memory.random() < 0.25
        self.is_healed = False

    def _trouble(self, bugs: Random) -> None:
        """Let nodes plan and write slowly, hit a bug, and use the same name."""
        world = self.world
        self.has_bug = bugs.random() < 0.3
        self.has_hang = bugs.random() < 0.4
        world.think_s = bugs.choice((0.0, 0.0, 0.05, 0.6))
        world.disk_s = bugs.choice((0.0, 0.0, 0.02, 1.5))
        if max(world.think_s, world.disk_s) > SETTLE_S:  # nodes follow plans unknown to others
            world.is_calm = False
        if bugs.random() < 0.3:
            world.names = {each: bugs.choice(("a", "b", "c")) for each in range(self.count)}
            world.prefer = (*bugs.sample(("a", "b", "nobody"), 2),)
            world.exclude = bugs.choice((None, ("c", "nobody either")))

    async def run(self) -> None:
        """Run the schedule."""
        world, random, loop = self.world, self.random, self.world.loop
        looking = loop.create_task(self._look())
        for number in range(self.count):
            loop.call_later(random.uniform(0, 3), self._begin, number)
        end = random.uniform(8, 16)
        for _ in range(random.randint(0, 5)):
            loop.call_later(random.uniform(0.5, end), self._fault)
        for _ in range(random.randint(1, 6)):
            loop.call_later(random.uniform(1, end), self._ask)
        self._plan_people(end)
        self._plan_shortages(end)
        await asyncio.sleep(end)
        self._heal()
        await self._settle()
        if not world.wrong:
            await self._ask_all()
        if world.is_calm and world.plans.rivals:
            world.fault(f"nothing went wrong, and of some epochs are {world.plans.rivals} plans")
        if not world.wrong:
            await self._all_leave()
        for number in list(world.running):
            world.crash(number, silently=False)
        await asyncio.sleep(1.0)
        looking.cancel()

    def _plan_people(self, end: float) -> None:
        people, loop = self.people, self.world.loop
        if self.has_bug:
            loop.call_later(self.bugs.uniform(2, end), self._harm, self._break, 0)
        if self.has_jumps:
            for number in range(self.count):
                self._jump(number)
            for _ in range(people.randint(1, 6)):
                loop.call_later(people.uniform(0, end), self._jump, people.randrange(self.count))
        if self.has_hang:
            loop.call_later(self.bugs.uniform(2, end), self._harm, self._hang, 0)
        if self.has_removal:
            loop.call_later(people.uniform(3, end), self._remove)
        for _ in range(ROUGH if self.is_rough else 0):
            loop.call_later(people.uniform(0.5, end), self._fault)
            loop.call_later(people.uniform(0.5, end), self._ask)

    def _plan_shortages(self, end: float) -> None:
        memory, loop = self.memory, self.world.loop
        for _ in range(memory.randint(1, 3) if self.has_shortage else 0):
            loop.call_later(memory.uniform(0, end), self._harm, self._starve, 0)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.checks.look()
            self.world.look_for_bugs()
            self.world.look_for_hangs()
            if self.is_healed:
                self._bring_back()

    # What people do

    def _begin(self, number: int) -> None:
        if number in self.world.newcomers:
            self._join(number)
        else:
            self.world.start(number)

    def _join(self, number: int) -> None:
        """Start a node with a ticket of a running node, or one shared with another."""
        world, people = self.world, self.people
        inviters = [each for each in self._awake() if not world.members.is_out(each)]
        if self.is_healed:
            return
        if not inviters:
            world.loop.call_later(LOOK_S, self._join, number)
            return
        given = list(world.members.tickets.values())
        if self.is_scarce and given and people.random() < 0.7:
            ticket = given[-1]
        else:
            ticket = self._ticket(people.choice(inviters))
        world.note(f"{number} has a ticket of {ticket.inviter}, for {ticket.uses or 'all'}")
        world.members.invite(number, ticket)
        world.loop.call_later(people.choice((0.0, 0.0, 1.0, 4.0)), world.start, number)
        if people.random() < 0.4:
            harm = people.choice((self._leave, self._crash, self._pause))
            world.loop.call_later(people.uniform(0, 1), self._harm, harm, ticket.inviter)

    def _ticket(self, inviter: int) -> Ticket:
        lasts_s, uses = self.people.choice(TICKETS_S), 1 if self.is_scarce else None
        return self.world.invite(inviter, lasts_s=lasts_s, uses=uses)

    def _remove(self) -> None:
        world, people = self.world, self.people
        nodes = [each for each in self._awake() if world.nodes[each].machine.charter]
        if nodes and self.count > 2:
            number = people.choice(nodes)
            gone = people.choice([each for each in range(1, self.count) if each != number])
            world.remove(number, gone)
            if people.random() < 0.3:
                world.loop.call_later(people.uniform(0, 4), self._harm, self._crash, number)

    def _awake(self) -> list[int]:
        """Return the nodes that a user can reach."""
        running = self.world.running
        return [each for each in sorted(self.world.nodes) if not running[each].process.is_paused]

    def _jump(self, number: int) -> None:
        self.world.jump(number, self.people.choice((-1, 1)) * self.people.choice(JUMPS_S))

    def _ask(self) -> None:
        if self.world.nodes:
            self.world.ask(self.random.choice(sorted(self.world.nodes)))

    def _ask_one(self, _: int) -> None:
        if self.world.nodes:
            self.world.ask(self.bugs.choice(sorted(self.world.nodes)), may_cancel=False)

    # What goes wrong

    def _fault(self) -> None:
        running = sorted(self.world.running)
        if running:
            faults = self._crash, self._crash, self._leave, self._pause, self._pause, self._cut
            self.random.choice(faults)(self.random.choice(running))

    def _harm(self, harm: Callable[[int], None], number: int) -> None:
        if not self.is_healed:
            harm(number)

    def _crash(self, number: int) -> None:
        self.world.crash(number, silently=self.random.random() < 0.5)
        self._restart(number)

    def _break(self, _: int) -> None:
        if self.world.nodes:
            number = self.bugs.choice(sorted(self.world.nodes))
            self.world.break_(number, self.bugs.choice(TIMERS))
            if self.bugs.random() < 0.7:
                self.world.coming += 1
                self.world.loop.call_later(self.bugs.uniform(4, 8), self._back, number)

    def _hang(self, _: int) -> None:
        nodes = self.world.nodes
        ranks = [number for number, node in nodes.items() if node.ring_member.rank]
        if nodes:
            number = self.bugs.choice(sorted(ranks or nodes))
            self.world.hang(number, self.bugs.choice((1.0, 30.0)))
            for later in (0.0, 2.0):  # a thread without a job cannot be seen to hang
                self.world.loop.call_later(later, self._harm, self._ask_one, 0)

    def _starve(self, _: int) -> None:
        memory, running = self.memory, sorted(self.world.running)
        number = memory.randrange(self.count)
        self.world.starve(number, memory.choice((0, 1, 1, 2)), memory.choice((3.0, 30.0)))
        others = [each for each in running if each != number]
        if others and memory.random() < 0.7:  # so that it has to load more
            self._crash(memory.choice(others))

    def _leave(self, number: int) -> None:
        self.world.leave(number)
        self._restart(number)

    def _restart(self, number: int) -> None:
        if self.random.random() < 0.7:
            self.world.coming += 1
            self.world.loop.call_later(self.random.uniform(0.1, 6), self._back, number)

    def _back(self, number: int) -> None:
        self.world.coming -= 1
        self.world.start(number)

    def _pause(self, number: int) -> None:
        self.world.pause(number, self.random.uniform(0.1, 6))

    def _cut(self, _: int) -> None:
        here = set(self.random.sample(range(self.count), self.random.randint(1, self.count - 1)))
        ways = [(a, b) for a in sorted(here) for b in range(self.count) if b not in here]
        if self.random.random() < 0.6:
            ways += [way[::-1] for way in ways]
        self.world.cut(ways, self.random.uniform(0.5, 8))

    # How it ends

    def _heal(self) -> None:
        world = self.world
        self.is_healed = True
        world.note("all faults end")
        world.network.heal(*world.network.cuts)
        for at in world.running.values():
            world.resume(at.process)
        for number in list(world.loop.room):
            world.relieve(number)
        self._bring_back()
        if world.newcomers:
            world.loop.call_later(BEACON_S, self._tell_places)

    def _bring_back(self) -> None:
        """Start, or restart, the nodes that the others depend on."""
        world = self.world
        if not any(node.machine.charter for node in world.nodes.values()):
            world.start(0)
        if world.members.remover is not None:
            world.start(world.members.remover)  # perhaps no other node knows of that
        for number in sorted(world.members.tickets.keys() - world.members.credentials.keys()):
            self._help(number)

    def _tell_places(self) -> None:
        """Help nodes whose inviter is gone."""
        if not self.world.is_over:
            self.world.acquaint()
            self.world.loop.call_later(BEACON_S, self._tell_places)

    def _help(self, number: int) -> None:
        """Restart the inviter of this node, or give up."""
        world, inviter = self.world, self.world.members.tickets[number].inviter
        if world.members.is_out(inviter):
            del world.members.tickets[number]
            world.crash(number, silently=False)
        else:
            world.start(inviter)

    async def _settle(self) -> None:
        world = self.world
        until = world.loop.time() + BOUND
        text: str | None = ""
        while world.loop.time() < until:
            await asyncio.sleep(LOOK_S)
            if world.wrong or (text := self.checks.unsettled()) is None:
                world.note("all is well")
                return
        world.fault(f"after {BOUND:.0f} s {text}")

    async def _ask_all(self) -> None:
        world = self.world
        if self.checks.fits:
            before = len(world.asked)
            for number in sorted(self.checks.here):
                world.ask(number, may_cancel=False)
            asked = world.asked[before:]
            for _ in range(int(FRESH_S / LOOK_S)):
                await asyncio.sleep(LOOK_S)
                if all(one.outcome for one in asked):
                    break
            for one in asked:
                if one.outcome != "answered":
                    world.fault(f"a fresh request at {one.number}: {one.outcome or 'no answer'}")
            await self._settle()  # the plan may change now that the entry is calm

    async def _all_leave(self) -> None:
        world = self.world
        world.is_over = True
        for number in list(world.running):
            world.leave(number)
        await asyncio.sleep(LEAVE_S)
        if world.running:
            world.fault(f"{sorted(world.running)} do not leave")
