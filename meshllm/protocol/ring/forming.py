"""How a node takes its place in the ring of a plan, and takes it again when the ring breaks.

Theory of operation
-------------------
::

         follow           loaded            formed           dialled          arrived
    IDLE ------> LOADING -------> WAITING ---------> DIALING -------> HALF ----------> OPEN
                    |                ^                  |              |                 |
         unloadable |                | pause is over    | failed       | late, gone      | broke
                    v                |                  v              v                 v
                 UNLOADED            '--------------- BACKOFF <--------------------------'

Each node dials the rank after it and takes the link of the rank before it, once all nodes of the
plan have loaded their spans (``formed``). A ring of one opens as soon as it has loaded. ``follow``
gives everything up in any state: the job under way stops, idle links of older plans are closed.

The driver does one job at a time, `Load`, `Dial` or `Begin`, and reports its outcome; a job that
was stopped reports nothing. It reads ahead on every idle link and reports ``gone`` when the other
end let go of it. Links have numbers here; those of a `Begin` belong to its job once that has begun.

Races, and who wins:

- A link of the rank before may arrive at any time, before this node has heard of the plan: the
  latest of each node waits, unless it is for a plan older than the one in force.
- A rank before with a later plan: the plan. This attempt is given up, and the link waits for it.
- Both ends begin anew at the same time: the later link replaces the earlier one, and an attempt
  ends when the rank after lets go of what was dialled. Pauses grow, so attempts meet.
"""

from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from meshllm.errors import MeshError
from meshllm.names import NodeId
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.session.link import SILENCE
from meshllm.protocol.session.messages import Hello

ARRIVE_S = 2 * SILENCE  # s; the rank before has loaded too, and dials with retries
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 2.0  # s; backoff between two attempts


class State(Enum):
    """How far a node is with the plan in force."""

    IDLE = auto()
    """The plan gives it no layers."""
    LOADING = auto()
    UNLOADED = auto()
    """Its span cannot be loaded; it waits for another plan, or for ``reload``."""
    WAITING = auto()
    DIALING = auto()
    HALF = auto()
    OPEN = auto()
    BACKOFF = auto()


@dataclass(frozen=True, slots=True)
class Stop:
    """End the job under way; the next one begins after its end."""


@dataclass(frozen=True, slots=True)
class Release:
    """Let go of what is loaded."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load this node's span; answer ``loaded`` or ``unloadable``."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a link to a node and greet it; answer ``dialled`` or ``failed``."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Begin:
    """Serve over these links, None in a ring of one; answer ``broke``."""

    plan: Plan
    before: int | None
    after: int | None


@dataclass(frozen=True, slots=True)
class Close:
    """Close a link, unless it belongs to a job."""

    link: int


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the mesh whether the span is loaded, and what is wrong."""

    is_loaded: bool
    trouble: MeshError | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt, or a ring, has ended; another attempt follows."""

    reason: str


Action = Stop | Release | Load | Dial | Begin | Close | Report | Failed


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A link from a node that wants this one as the rank after it."""

    epoch: int
    link: int


class Forming:
    """The place of one node in one plan after the other; times are on the driver's clock."""

    def __init__(self, me: NodeId) -> None:
        self.state = State.IDLE
        self.plan: Plan | None = None
        """In force."""
        self._me = me
        self._latest = 0  # epoch that was followed
        self._is_formed = False
        self._arrivals: dict[NodeId, _Arrival] = {}
        self._dialled: int | None = None
        self._given: list[int] = []  # to a Begin whose job may not have begun
        self._pause = FIRST_PAUSE_S / 2  # doubled before each pause
        self._since = 0.0  # the state is entered

    def follow(self, plan: Plan | None, now: float) -> list[Action]:
        """Take another plan as the one in force."""
        if plan == self.plan:
            return []
        self.plan, self._is_formed, self._pause = plan, False, FIRST_PAUSE_S / 2
        self._latest = plan.epoch if plan else self._latest
        oldest = plan.epoch if plan else self._latest + 1
        given_up: list[Action] = [
            Stop(),
            *self._let_go(),
            *self._sweep(oldest),
            Report(is_loaded=False),
        ]
        if plan is None or plan.rank(self._me) is None:
            self._enter(State.IDLE, now)
            return [*given_up, Release()]
        self._enter(State.LOADING, now)
        return [*given_up, Load(plan)]

    def loaded(self, now: float) -> list[Action]:
        """Hear that the span is loaded."""
        if self.state is not State.LOADING or self.plan is None:
            return []
        report = Report(is_loaded=True)
        if len(self.plan.stages) == 1:
            self._enter(State.OPEN, now)
            return [report, Begin(self.plan, None, None)]
        self._enter(State.WAITING, now)
        return [report, *self._attempt(now)]

    def unloadable(self, trouble: MeshError, now: float) -> list[Action]:
        """Hear that the span cannot be loaded, and why."""
        if self.state is not State.LOADING:
            return []
        self._enter(State.UNLOADED, now)
        return [Report(is_loaded=False, trouble=trouble)]

    def reload(self, now: float) -> list[Action]:
        """Try again to load a span that could not be loaded."""
        if self.state is not State.UNLOADED or self.plan is None:
            return []
        self._enter(State.LOADING, now)
        return [Load(self.plan)]

    def formed(self, now: float, *, is_formed: bool) -> list[Action]:
        """Hear whether all nodes of the plan in force have loaded their spans."""
        self._is_formed = is_formed
        return self._attempt(now)

    def dialled(self, link: int, now: float) -> list[Action]:
        """Take the link to the rank after."""
        if self.state is not State.DIALING:
            return [Close(link)]
        self._dialled = link
        self._enter(State.HALF, now)
        return self._meet(now)

    def failed(self, reason: str, now: float) -> list[Action]:
        """Hear that the rank after cannot be reached."""
        return self._back_off(reason, now) if self.state is State.DIALING else []

    def arrived(self, peer: NodeId, hello: Hello, link: int, now: float) -> list[Action]:
        """Take a link on which a node greeted this one."""
        epoch = self.plan.epoch if self.plan else 0
        if hello.node != peer or hello.epoch < epoch:
            return [Close(link)]
        before = self._arrivals.get(peer)
        self._arrivals[peer] = _Arrival(hello.epoch, link)
        return [*([Close(before.link)] if before else []), *self._meet(now)]

    def gone(self, link: int, now: float) -> list[Action]:
        """Hear that the other end of an idle link let go of it."""
        if link == self._dialled:
            return self._back_off("The rank after gave up", now)
        self._arrivals = {
            peer: arrival for peer, arrival in self._arrivals.items() if arrival.link != link
        }
        return [Close(link)]

    def broke(self, reason: str, now: float) -> list[Action]:
        """Hear that the ring at work has ended."""
        if self.state is not State.OPEN:
            return []
        self._given = []
        if now - self._since > SILENCE:
            self._pause = FIRST_PAUSE_S / 2
        return self._back_off(reason, now)

    def close(self) -> list[Action]:
        """Give everything up, for good."""
        self.state, self.plan = State.IDLE, None
        return [Stop(), *self._let_go(), *self._sweep(inf)]

    @property
    def deadline(self) -> float | None:
        """When ``expire`` has something to do."""
        match self.state:
            case State.HALF:
                return self._since + ARRIVE_S
            case State.BACKOFF:
                return self._since + self._pause
            case _:
                return None

    def expire(self, now: float) -> list[Action]:
        """Give an attempt up, or begin the next."""
        if self.deadline is None or now < self.deadline:
            return []
        if self.state is State.HALF:
            return self._back_off("The rank before did not link in time", now)
        self._enter(State.WAITING, now)
        return self._attempt(now)

    def _attempt(self, now: float) -> list[Action]:
        """Dial, once all have loaded."""
        if self.state is not State.WAITING or not self._is_formed or self.plan is None:
            return []
        self._enter(State.DIALING, now)
        return [Dial(self._neighbour(1))]

    def _meet(self, now: float) -> list[Action]:
        """Open the ring when both links are here."""
        if self.state is not State.HALF or self.plan is None:
            return []
        before = self._neighbour(-1)
        arrival = self._arrivals.get(before)
        if arrival is None:
            return []
        if arrival.epoch > self.plan.epoch:
            return self._back_off("The rank before follows a later plan", now)
        del self._arrivals[before]
        after, self._dialled = self._dialled, None
        self._given = [link for link in (arrival.link, after) if link is not None]
        self._enter(State.OPEN, now)
        return [Begin(self.plan, arrival.link, after)]

    def _neighbour(self, distance: int) -> NodeId:
        assert self.plan is not None  # the states that ask for a neighbour have a plan
        rank = self.plan.rank(self._me) or 0
        return self.plan.stages[(rank + distance) % len(self.plan.stages)].node

    def _back_off(self, reason: str, now: float) -> list[Action]:
        self._pause = min(self._pause * 2, LAST_PAUSE_S)
        self._enter(State.BACKOFF, now)
        return [Failed(reason), *self._let_go()]

    def _let_go(self) -> list[Close]:
        links = [*self._given, *([] if self._dialled is None else [self._dialled])]
        self._given, self._dialled = [], None
        return [Close(link) for link in links]

    def _sweep(self, oldest: float) -> list[Close]:
        """Close the links for plans before this epoch, which nobody takes any more."""
        old = [peer for peer, arrival in self._arrivals.items() if arrival.epoch < oldest]
        return [Close(self._arrivals.pop(peer).link) for peer in old]

    def _enter(self, state: State, now: float) -> None:
        self.state, self._since = state, now
