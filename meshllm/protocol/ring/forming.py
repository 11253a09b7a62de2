"""The machine that forms the ring of a plan on one node, and forms it again after a loss.

Theory of operation
-------------------
::

         follow           loaded            formed           dialled          arrived
    IDLE ------> LOADING -------> WAITING ---------> DIALING -------> HALF ----------> OPEN
                    |                ^                  |              |                 |
         unloadable |                | backoff ended    | failed       | timeout, gone   | broke
                    v                |                  v              v                 v
                 UNLOADED            '--------------- BACKOFF <--------------------------'

Once all nodes of the plan have loaded their spans (``formed``), each node dials the next rank and
accepts the link of the previous rank. A ring of one opens as soon as it has loaded. One that breaks
after it was open for `SILENCE` is formed again at once: a link may have blinked. ``follow``
abandons any state: the current job is stopped, and idle links of older plans are closed. `NEXT` is
the whole table.

The driver runs one job at a time, `Load`, `OpenLink` or `Begin`, and reports its outcome; a stopped
job reports nothing. It reads ahead on every idle link, and reports ``gone`` when the peer closed
it. Links are identified by numbers; those of a `Begin` belong to its job once that has started.

Races, and who wins:

- A link of the previous rank may arrive at any time, even before this node knows the plan: the
  latest one per node is kept, unless its plan is older than the one in force. Of too many, the
  oldest is closed, but not that of the previous rank: its node dials again.
- The previous rank follows a later plan: that plan wins. This attempt ends; the link is kept. So it
  does for another plan of the same epoch: nodes with other records may choose one for a while.
- A neighbour that has loaded, but is not linked for `LINK_S` of attempts, or only for another plan,
  is reported as `missing`: a node that only claims to serve would keep the ring from forming. An
  honest one says that it has loaded another plan, before it links for that.
- A next rank that closes the link is not blamed: its own neighbours may be why. Nor is one whose
  links end as soon as the ring is open.
- Both ends restart at the same time: the later link replaces the earlier one, and an attempt ends
  when the next rank closes the dialled link. The backoff grows until attempts overlap.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import TypeAlias

from meshllm.errors import MeshError
from meshllm.names import Digest, NodeId
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.session.link import SILENCE
from meshllm.protocol.session.messages import Hello

ARRIVE_S = 2 * SILENCE  # s; the previous rank has loaded too, and dials with retries
LINK_S = 30.0  # s; several attempts at each end, however they overlap
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 2.0  # s; between two attempts
MAX_ARRIVALS = 64  # waiting links; honest nodes have one for each plan that is to come
MAX_HISTORY = 16  # states; those of two losses


class FormingState(Enum):
    """The progress of a node with the plan in force."""

    IDLE = auto()
    """There is no plan, or the node has no stage in it."""
    LOADING = auto()
    UNLOADED = auto()
    """Loading the span failed; a new plan or ``reload`` leaves this state."""
    WAITING = auto()
    """Loaded; other nodes of the plan are not."""
    DIALING = auto()
    HALF = auto()
    """Linked to the next rank, not yet to the previous one."""
    OPEN = auto()
    BACKOFF = auto()


class FormingEvent(Enum):
    """What changes the state: the methods of `Forming`, and what they find has happened before."""

    FOLLOW = auto()
    LOADED = auto()
    UNLOADABLE = auto()
    RELOAD = auto()
    FORMED = auto()
    """All nodes have loaded: reported now, or before this state was entered."""
    DIALLED = auto()
    FAILED = auto()
    ARRIVED = auto()
    """The link of the previous rank: it came now, or before this node had dialled."""
    GONE = auto()
    """The dialled link; that of others changes no state."""
    BROKE = auto()
    EXPIRE = auto()


_Row: TypeAlias = Mapping[FormingEvent, Collection[FormingState]]


def _row(events: _Row) -> _Row:
    """Return the row of a state; any state is left for another plan."""
    return {FormingEvent.FOLLOW: (FormingState.IDLE, FormingState.LOADING), **events}


NEXT: Mapping[FormingState, _Row] = {
    FormingState.IDLE: _row({}),
    FormingState.LOADING: _row(
        {
            # A ring of one is open at once.
            FormingEvent.LOADED: (FormingState.WAITING, FormingState.OPEN),
            FormingEvent.UNLOADABLE: (FormingState.UNLOADED,),
        }
    ),
    FormingState.UNLOADED: _row({FormingEvent.RELOAD: (FormingState.LOADING,)}),
    # A ring of one waits only after it broke.
    FormingState.WAITING: _row({FormingEvent.FORMED: (FormingState.DIALING, FormingState.OPEN)}),
    FormingState.DIALING: _row(
        {
            FormingEvent.DIALLED: (FormingState.HALF,),
            FormingEvent.FAILED: (FormingState.BACKOFF,),
        }
    ),
    FormingState.HALF: _row(
        {
            # It backs off from a previous rank that follows another plan.
            FormingEvent.ARRIVED: (FormingState.OPEN, FormingState.BACKOFF),
            FormingEvent.GONE: (FormingState.BACKOFF,),
            FormingEvent.EXPIRE: (FormingState.BACKOFF,),
        }
    ),
    # It backs off if it was open for a short time only.
    FormingState.OPEN: _row({FormingEvent.BROKE: (FormingState.WAITING, FormingState.BACKOFF)}),
    FormingState.BACKOFF: _row({FormingEvent.EXPIRE: (FormingState.WAITING,)}),
}
"""The states that may follow one, by event; an event that is not in its row changes nothing.

`Forming.close` ends in `IDLE` from any state.
"""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the current job; the next one starts after its end."""


@dataclass(frozen=True, slots=True)
class Release:
    """Unload the span."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load this node's span; report ``loaded`` or ``unloadable``."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Open a link to a node and send `Hello`; report ``dialled`` or ``failed``."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Begin:
    """Serve over these links, None in a ring of one; report ``broke``."""

    plan: Plan
    before: int | None
    after: int | None


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close a link, unless it belongs to a job."""

    link: int


@dataclass(frozen=True, slots=True)
class ReportLoad:
    """Publish whether the span is loaded, and the error if it cannot be."""

    is_loaded: bool
    trouble: MeshError | None = None


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """Log that an attempt or a ring has ended; another attempt follows."""

    reason: str


Action = Stop | Release | Load | OpenLink | Begin | CloseLink | ReportLoad | AttemptEnded


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A link from a node whose plan has this one as its next rank."""

    epoch: int
    plan: Digest
    link: int


class Forming:
    """One node's part in the rings of successive plans; times are on the driver's clock."""

    def __init__(self, me: NodeId) -> None:
        self.state = FormingState.IDLE
        self.plan: Plan | None = None
        """The plan in force."""
        self._me = me
        self._latest = 0  # epoch of the last plan
        self._is_formed = False
        self._missing: NodeId | None = None  # the neighbour for whom the last attempt ended
        self._closed_since = 0.0  # when all had loaded, or the last ring ended
        self._arrivals: dict[NodeId, _Arrival] = {}
        self._dialled: int | None = None
        self._job_links: list[int] = []  # links of a Begin whose job may not have started
        self._backoff_s = FIRST_BACKOFF_S / 2  # doubled before each
        self._since = 0.0  # when the state was entered
        self.history = deque[tuple[FormingState, float]](maxlen=MAX_HISTORY)
        """The latest states and when they were entered, oldest first."""

    def follow(self, plan: Plan | None, now: float) -> list[Action]:
        """Put another plan in force."""
        if plan == self.plan:
            return []
        self.plan, self._is_formed, self._backoff_s = plan, False, FIRST_BACKOFF_S / 2
        self._missing = None
        self._latest = plan.epoch if plan else self._latest
        oldest = plan.epoch if plan else self._latest + 1
        given_up: list[Action] = [
            Stop(),
            *self._close_links(),
            *self._close_arrivals(oldest),
            ReportLoad(is_loaded=False),
        ]
        if plan is None or plan.rank(self._me) is None:
            self._enter(FormingEvent.FOLLOW, FormingState.IDLE, now)
            return [*given_up, Release()]
        self._enter(FormingEvent.FOLLOW, FormingState.LOADING, now)
        return [*given_up, Load(plan)]

    def loaded(self, now: float) -> list[Action]:
        """Note that the span is loaded."""
        if not self._expects(FormingEvent.LOADED) or self.plan is None:
            return []
        report = ReportLoad(is_loaded=True)
        if len(self.plan.stages) == 1:
            self._enter(FormingEvent.LOADED, FormingState.OPEN, now)
            return [report, Begin(self.plan, None, None)]
        self._enter(FormingEvent.LOADED, FormingState.WAITING, now)
        return [report, *self._attempt(now)]

    def unloadable(self, trouble: MeshError, now: float) -> list[Action]:
        """Note that the span cannot be loaded, and why."""
        if not self._expects(FormingEvent.UNLOADABLE):
            return []
        self._enter(FormingEvent.UNLOADABLE, FormingState.UNLOADED, now)
        return [ReportLoad(is_loaded=False, trouble=trouble)]

    def reload(self, now: float) -> list[Action]:
        """Retry loading after it failed."""
        if not self._expects(FormingEvent.RELOAD) or self.plan is None:
            return []
        self._enter(FormingEvent.RELOAD, FormingState.LOADING, now)
        return [Load(self.plan)]

    def formed(self, now: float, *, is_formed: bool) -> list[Action]:
        """Note whether all nodes of the plan in force have loaded their spans."""
        if is_formed and not self._is_formed:
            self._missing, self._closed_since = None, now
        self._is_formed = is_formed
        return self._attempt(now)

    def missing(self, now: float) -> NodeId | None:
        """Return the neighbour that keeps the ring from opening for `LINK_S`; None if none does."""
        is_long = self.state is not FormingState.OPEN and now - self._closed_since >= LINK_S
        return self._missing if self._is_formed and is_long else None

    def dialled(self, link: int, now: float) -> list[Action]:
        """Take the link to the next rank."""
        if not self._expects(FormingEvent.DIALLED):
            return [CloseLink(link)]
        self._dialled = link
        self._enter(FormingEvent.DIALLED, FormingState.HALF, now)
        return self._open_if_linked(now)

    def failed(self, reason: str, now: float) -> list[Action]:
        """Note that dialling the next rank failed."""
        if not self._expects(FormingEvent.FAILED):
            return []
        self._missing = self._neighbour(1)
        return self._back_off(FormingEvent.FAILED, reason, now)

    def arrived(self, peer: NodeId, hello: Hello, link: int, now: float) -> list[Action]:
        """Take an inbound link whose `Hello` has arrived."""
        epoch = self.plan.epoch if self.plan else 0
        if hello.node != peer or hello.epoch < epoch:
            return [CloseLink(link)]
        before = self._arrivals.pop(peer, None)
        self._arrivals[peer] = _Arrival(hello.epoch, hello.plan, link)
        replaced = [CloseLink(before.link)] if before else []
        return [*replaced, *self._close_surplus(), *self._open_if_linked(now)]

    def gone(self, link: int, now: float) -> list[Action]:
        """Note that the peer closed an idle link."""
        if link == self._dialled:
            self._missing = None  # it is there, and may wait for its own neighbour
            return self._back_off(FormingEvent.GONE, "The next rank closed the link", now)
        self._arrivals = {
            peer: arrival for peer, arrival in self._arrivals.items() if arrival.link != link
        }
        return [CloseLink(link)]

    def broke(self, reason: str, now: float) -> list[Action]:
        """Note that the open ring has ended."""
        if not self._expects(FormingEvent.BROKE):
            return []
        self._job_links, self._closed_since = [], now
        if now - self._since <= SILENCE:
            return self._back_off(FormingEvent.BROKE, reason, now)
        self._backoff_s = FIRST_BACKOFF_S / 2
        self._enter(FormingEvent.BROKE, FormingState.WAITING, now)
        return [AttemptEnded(reason), *self._close_links(), *self._attempt(now)]

    def close(self) -> list[Action]:
        """Stop the job and close all links, permanently."""
        self.state, self.plan = FormingState.IDLE, None
        return [Stop(), *self._close_links(), *self._close_arrivals(inf)]

    @property
    def deadline(self) -> float | None:
        """When to call ``expire`` next; None if there is no timeout."""
        match self.state:
            case FormingState.HALF:
                return self._since + ARRIVE_S
            case FormingState.BACKOFF:
                return self._since + self._backoff_s
            case _:
                return None

    def expire(self, now: float) -> list[Action]:
        """Handle the deadline: end an attempt, or start the next."""
        if self.deadline is None or now < self.deadline:
            return []
        if self.state is FormingState.HALF:
            self._missing = self._neighbour(-1)
            return self._back_off(
                FormingEvent.EXPIRE, "The previous rank did not connect in time", now
            )
        self._enter(FormingEvent.EXPIRE, FormingState.WAITING, now)
        return self._attempt(now)

    def _attempt(self, now: float) -> list[Action]:
        """Dial the next rank once all nodes have loaded."""
        is_due = self._is_formed and self._expects(FormingEvent.FORMED)
        if not is_due or self.plan is None:
            return []
        if len(self.plan.stages) == 1:
            self._enter(FormingEvent.FORMED, FormingState.OPEN, now)
            return [Begin(self.plan, None, None)]
        self._enter(FormingEvent.FORMED, FormingState.DIALING, now)
        return [OpenLink(self._neighbour(1))]

    def _open_if_linked(self, now: float) -> list[Action]:
        """Open the ring once both links exist."""
        if not self._expects(FormingEvent.ARRIVED) or self.plan is None:
            return []
        before = self._neighbour(-1)
        arrival = self._arrivals.get(before)
        if arrival is None:
            return []
        if (arrival.epoch, arrival.plan) != self.plan.precedence:
            self._missing = before
            return self._back_off(
                FormingEvent.ARRIVED, "The previous rank follows another plan", now
            )
        del self._arrivals[before]
        after, self._dialled = self._dialled, None
        self._job_links = [link for link in (arrival.link, after) if link is not None]
        self._enter(FormingEvent.ARRIVED, FormingState.OPEN, now)
        self._missing = None
        return [Begin(self.plan, arrival.link, after)]

    def _neighbour(self, distance: int) -> NodeId:
        assert self.plan is not None  # the states that ask for a neighbour have a plan
        rank = self.plan.rank(self._me) or 0
        return self.plan.stages[(rank + distance) % len(self.plan.stages)].node

    def _back_off(self, event: FormingEvent, reason: str, now: float) -> list[Action]:
        self._backoff_s = min(self._backoff_s * 2, LAST_BACKOFF_S)
        self._enter(event, FormingState.BACKOFF, now)
        return [AttemptEnded(reason), *self._close_links()]

    def _close_links(self) -> list[CloseLink]:
        links = [*self._job_links, *([] if self._dialled is None else [self._dialled])]
        self._job_links, self._dialled = [], None
        return [CloseLink(link) for link in links]

    def _close_arrivals(self, oldest: float) -> list[CloseLink]:
        """Close the waiting links for plans before this epoch."""
        old = [peer for peer, arrival in self._arrivals.items() if arrival.epoch < oldest]
        return [CloseLink(self._arrivals.pop(peer).link) for peer in old]

    def _close_surplus(self) -> list[CloseLink]:
        """Close the oldest waiting link if there are too many: a member may invent nodes."""
        if len(self._arrivals) <= MAX_ARRIVALS:
            return []
        awaited = self._neighbour(-1) if self.plan else None
        oldest = next(peer for peer in self._arrivals if peer != awaited)
        return [CloseLink(self._arrivals.pop(oldest).link)]

    def _expects(self, event: FormingEvent) -> bool:
        return event in NEXT[self.state]

    def _enter(self, event: FormingEvent, state: FormingState, now: float) -> None:
        assert state in NEXT[self.state][event]
        self.state, self._since = state, now
        self.history.append((state, now))
