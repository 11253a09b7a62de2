"""When a node retracts its offer, and when it offers again."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.errors import MeshError, ModelError, OutOfMemory
from meshllm.names import GroupId
from meshllm.node.agreement.offer import (
    FIRST_RETRY_S,
    LAST_RESTORE_S,
    LAST_RETRY_S,
    MAX_SLOW,
    RESTORE_S,
    SMALLER,
    WATCH_S,
    NodeOffer,
)
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.planning.plan import MAX_SECONDS
from meshllm.testing.clock import run_virtual
from tests.builders.snapshots import profile

MEASURED = replace(profile(4), reserve_bytes=100)
BARE = replace(MEASURED, weights=(), layer_s=(), memory_bytes=0, addresses=("ws://here",))


class Case:
    """An offer with fakes around it."""

    def __init__(self) -> None:
        self.told: list[Profile] = []
        self.member = SimpleNamespace(
            trouble=cast("MeshError | None", None),
            failure=cast("MeshError | None", None),
            runtime=self,
            is_loaded=False,
            is_hung=False,
            ranks=list[object](),
            publish=list,
        )
        self.worker = SimpleNamespace(hung_s=0.0, sleep=partial(asyncio.sleep, WATCH_S))
        self.delays: list[float] = []
        self.later: list[Callable[[], None]] = []
        self.reloads = 0
        self.layer_s: float | None = None
        """Of one row, as steps show it."""
        self.offer = NodeOffer(
            BARE,
            self.told.append,
            cast("Any", self.member),
            cast("Any", self.call_later),
        )

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: object) -> None:
        self.delays.append(delay_s)
        self.later.append(partial(callback, *args))

    def take_layer_s(self) -> float | None:
        taken, self.layer_s = self.layer_s, None
        return taken

    def reload(self) -> None:
        self.reloads += 1

    @property
    def is_open(self) -> bool:
        return bool(self.told[-1].layer_s and self.told[-1].weights)

    def fail(self, trouble: MeshError) -> None:
        self.member.trouble = self.member.failure = trouble
        self.offer.withdraw()


@pytest.fixture
def case() -> Case:
    case = Case()
    case.offer.begin(MEASURED)
    return case


def test_what_changed_while_it_was_measured_stays(case: Case) -> None:
    assert case.is_open
    assert (case.told[-1].addresses, case.told[-1].layer_s) == (("ws://here",), MEASURED.layer_s)


def test_a_failure_retracts_the_offer_for_longer_each_time(case: Case) -> None:
    for _ in range(9):
        case.fail(ModelError("damaged"))
        assert not case.is_open
        case.later.pop()()
        assert (case.is_open, case.member.trouble) == (True, None)

    assert case.delays == [min(FIRST_RETRY_S * 2**n, LAST_RETRY_S) for n in range(9)]
    assert case.reloads == 9
    assert case.told[-1].memory_bytes == MEASURED.memory_bytes


def test_a_failure_after_success_retracts_the_offer_for_the_shortest_time(case: Case) -> None:
    for _ in range(3):
        case.fail(ModelError("no node has the weights now"))
        case.offer.withdraw()  # nothing is loaded
        case.later.pop()()

    case.member.is_loaded = True
    case.offer.withdraw()  # as the records have changed
    case.fail(ModelError("no node has the weights now"))

    assert case.delays == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S, FIRST_RETRY_S]


def test_after_running_out_of_memory_less_is_offered_and_nothing_reloaded(case: Case) -> None:
    case.fail(OutOfMemory("no memory", needed_bytes=200))
    case.later.pop()()

    assert case.told[-1].memory_bytes == 100 + int(200 * SMALLER)
    assert case.reloads == 0


def test_a_failure_while_it_is_retracted_changes_nothing(case: Case) -> None:
    case.fail(ModelError("damaged"))
    before = len(case.told)

    case.fail(ModelError("damaged still"))

    assert (len(case.told), len(case.delays)) == (before, 1)


def test_running_out_of_memory_again_while_it_is_retracted_offers_less_still(case: Case) -> None:
    case.fail(OutOfMemory("no memory", needed_bytes=200))
    case.fail(OutOfMemory("no memory", needed_bytes=100))
    _, offer_again, _ = case.later

    offer_again()

    assert case.is_open
    assert case.told[-1].memory_bytes == 100 + int(100 * SMALLER)


def test_memory_that_did_not_suffice_is_offered_again_later_and_later_still_after_a_relapse(
    case: Case,
) -> None:
    for lack in range(7):
        case.fail(OutOfMemory("no memory", needed_bytes=200))
        end_lack, offer_again = case.later
        offer_again()
        assert case.told[-1].memory_bytes == 100 + int(200 * SMALLER)
        end_lack()
        assert case.told[-1].memory_bytes == MEASURED.memory_bytes
        assert case.delays[0] == min(RESTORE_S * 2**lack, LAST_RESTORE_S)
        case.later.clear()
        case.delays.clear()


def test_a_lack_of_memory_ends_with_its_time_while_the_offer_is_retracted(case: Case) -> None:
    case.fail(OutOfMemory("no memory", needed_bytes=200))
    end_lack, offer_again = case.later

    end_lack()
    assert not case.is_open

    offer_again()
    assert (case.is_open, case.told[-1].memory_bytes) == (True, MEASURED.memory_bytes)


def test_a_further_lack_of_memory_is_not_over_with_the_first(case: Case) -> None:
    for _ in range(2):
        case.fail(OutOfMemory("no memory", needed_bytes=200))
        case.later[-1]()

    case.later[0]()  # the time of the first

    assert case.told[-1].memory_bytes == 100 + int(200 * SMALLER)


def test_another_ring_gets_the_memory_that_did_not_suffice_for_the_last(case: Case) -> None:
    case.offer.share(ONE, replace(profile(1), memory_bytes=150))
    case.fail(OutOfMemory("no memory", needed_bytes=0))
    end_lack, offer_again = case.later
    offer_again()
    assert case.told[-1].memory_bytes == 150 + MEASURED.reserve_bytes

    case.offer.end()
    case.offer.begin(MEASURED)
    assert case.told[-1].memory_bytes == MEASURED.memory_bytes

    told = len(case.told)
    end_lack()
    assert len(case.told) == told


def test_a_failure_counts_if_the_plan_changes_at_once(case: Case) -> None:
    case.member.failure = OutOfMemory("no memory", needed_bytes=200)
    case.member.trouble = None  # the span of the next plan is loading

    case.offer.withdraw()
    assert not case.is_open
    case.later.pop()()

    assert case.told[-1].memory_bytes == 100 + int(200 * SMALLER)


def test_others_may_fetch_the_weights_of_a_retracted_offer(case: Case) -> None:
    case.fail(ModelError("no node has the other weights"))
    assert (case.is_open, case.told[-1].weights) == (False, MEASURED.weights)

    case.offer.set_weights((b"new",))
    assert (case.is_open, case.told[-1].weights) == (False, (b"new",))


def test_another_ring_begins_without_the_offer_and_the_backoff_of_the_last(case: Case) -> None:
    case.fail(ModelError("damaged"))
    case.offer.end()
    assert (case.told[-1].layer_s, case.offer.measured.layer_s) == ((), ())

    case.offer.begin(MEASURED)
    case.fail(ModelError("damaged"))

    assert case.delays == [FIRST_RETRY_S, FIRST_RETRY_S]


def test_a_backoff_of_another_ring_does_not_end_that_of_this_one(case: Case) -> None:
    case.fail(ModelError("damaged"))
    case.offer.end()
    case.offer.begin(MEASURED)
    case.fail(ModelError("damaged here too"))
    of_other, of_this = case.later

    of_other()
    assert not case.is_open

    of_this()
    assert case.is_open


@pytest.mark.parametrize("ranks", [0, 1])
def test_a_thread_that_hangs_in_a_further_ring_is_reported(case: Case, ranks: int) -> None:
    async def scenario() -> None:
        case.offer.end()
        case.member.ranks = [object()] * ranks
        watching = asyncio.ensure_future(
            case.offer.watch(cast("Any", case.worker), cast("Any", case.member))
        )
        case.worker.hung_s = 7.0
        await asyncio.sleep(3)
        assert case.member.is_hung == (ranks > 0)
        assert not case.is_open
        watching.cancel()

    run_virtual(scenario())


def test_a_hung_compute_thread_retracts_the_offer_until_it_responds(case: Case) -> None:
    async def scenario() -> None:
        watching = asyncio.ensure_future(
            case.offer.watch(cast("Any", case.worker), cast("Any", case.member))
        )
        case.worker.hung_s = 7.0
        await asyncio.sleep(3)
        assert case.offer.hang == "the compute thread has hung for 7 s"
        assert (case.is_open, case.member.is_hung) == (False, True)

        case.offer.begin(MEASURED)  # for another ring, meanwhile
        case.worker.hung_s = 10.0
        await asyncio.sleep(3)
        assert not case.is_open
        assert case.offer.hang == "the compute thread has hung for 10 s"

        case.worker.hung_s = 0.0
        await asyncio.sleep(3)
        assert case.offer.hang == ""
        assert (case.is_open, case.member.is_hung) == (True, False)
        watching.cancel()

    run_virtual(scenario())


async def seen(case: Case, times: float | None, wait_s: float = 3 * WATCH_S) -> float:
    """Let steps take so many times as long as measured; return the same of what is published."""
    _, layer_s = MEASURED.layer_s[0]
    case.layer_s = None if times is None else times * layer_s
    await asyncio.sleep(wait_s)
    return case.told[-1].layer_s[0][1] / layer_s


def test_a_slow_machine_says_so_until_it_is_fast_again(case: Case) -> None:
    rows, _ = MEASURED.layer_s[0]

    async def scenario() -> None:
        see = partial(seen, case)
        refining = asyncio.ensure_future(case.offer.refine())
        published = [
            await see(times) for times in (1.9, 3.0, 2.0, 1.6, 1.4, 1.9, 8.0, 1.5, 1.0, 1e9)
        ]
        assert published == pytest.approx([1, 3, 3, 3, 1, 1, 8, 1.5, 1, MAX_SLOW])
        assert case.told[-1].layer_s[0][0] == rows
        assert case.told[-1].head_s == pytest.approx(MAX_SLOW * MEASURED.head_s)
        case.offer.set_weights((b"more",))
        assert await see(None) == pytest.approx(MAX_SLOW)
        assert await see(None, RESTORE_S) == 1.0
        assert await see(3.0) == pytest.approx(3)
        assert await see(None, RESTORE_S) == pytest.approx(3)  # twice as long after a relapse
        assert await see(None, RESTORE_S) == 1.0
        case.member.runtime = None
        assert await see(4.0) == 1.0
        refining.cancel()

    run_virtual(scenario())


def test_a_machine_that_was_measured_while_it_was_busy_says_how_fast_it_is(case: Case) -> None:
    rows, _ = MEASURED.layer_s[0]

    async def scenario() -> None:
        see = partial(seen, case)
        case.offer.begin(MEASURED)
        refining = asyncio.ensure_future(case.offer.refine())
        published = [await see(times) for times in (0.8, 0.5, 0.4, 0.2, 1.0, 0.6, 0.9, 0.6, 1.6)]
        assert published == pytest.approx([1, 0.5, 0.5, 0.2, 1, 0.6, 1, 0.6, 1.6])
        near = [await see(times) for times in (1.0, 0.70, 0.72, 0.70, 0.80, 0.90, 0.72)]
        assert near == pytest.approx([1, 0.70, 0.70, 0.70, 0.70, 1, 1])
        assert await see(0.0) == pytest.approx(1 / MAX_SLOW)
        assert case.told[-1].layer_s[0][0] == rows
        assert case.told[-1].head_s == pytest.approx(MEASURED.head_s / MAX_SLOW)
        assert await see(None, 2 * RESTORE_S) == pytest.approx(1 / MAX_SLOW)
        refining.cancel()

    run_virtual(scenario())


def test_a_slow_machine_is_published_with_no_more_seconds_than_peers_take(case: Case) -> None:
    case.offer.begin(replace(MEASURED, layer_s=((1, 100.0), (8, 1000.0)), head_s=100.0))

    async def scenario() -> None:
        refining = asyncio.ensure_future(case.offer.refine())
        case.layer_s = 6400.0
        await asyncio.sleep(3 * WATCH_S)
        refining.cancel()

    run_virtual(scenario())
    told = case.told[-1]
    assert told.layer_s == ((1, MAX_SECONDS), (8, MAX_SECONDS))
    assert Profile.decode(told.encode()) == told


def test_a_failure_during_a_hang_is_not_offered_again(case: Case) -> None:
    case.fail(ModelError("damaged"))
    case.offer.hang = "the compute thread has hung for 7 s"

    case.later.pop()()

    assert not case.is_open


def test_after_a_failure_during_a_hang_it_is_offered_again(case: Case) -> None:
    async def scenario() -> None:
        watching = asyncio.ensure_future(
            case.offer.watch(cast("Any", case.worker), cast("Any", case.member))
        )
        case.worker.hung_s = 7.0
        await asyncio.sleep(3)
        case.fail(ModelError("damaged"))
        case.worker.hung_s = 0.0
        await asyncio.sleep(3)
        watching.cancel()

    run_virtual(scenario())
    assert not case.is_open  # until the backoff ends

    case.later.pop()()

    assert case.told[-1].layer_s == MEASURED.layer_s


ONE, OTHER = GroupId(b"1"), GroupId(b"2")


def test_a_further_ring_gets_a_share_of_the_memory(case: Case) -> None:
    share = replace(profile(1), memory_bytes=150, model="other")

    case.offer.share(OTHER, share)
    case.offer.share(ONE, replace(share, memory_bytes=10_000))

    told = case.told[-1]
    assert [(each.group, each.memory_bytes, each.model) for each in told.shares] == [
        (ONE, told.memory_bytes - 150, "other"), (OTHER, 150, "other"),
    ]  # fmt: skip
    assert case.offer.shared_bytes == told.memory_bytes == MEASURED.memory_bytes
    case.offer.share(ONE, None)
    assert [each.group for each in case.told[-1].shares] == [OTHER]


def test_another_model_of_the_first_ring_keeps_shares_and_what_they_leave(case: Case) -> None:
    case.offer.share(ONE, replace(profile(1), memory_bytes=150))
    case.offer.end()

    case.offer.begin(replace(MEASURED, memory_bytes=10, reserve_bytes=999))  # measured with it

    told = case.told[-1]
    assert (told.memory_bytes, told.reserve_bytes) == (MEASURED.memory_bytes, 100)
    assert [each.memory_bytes for each in told.shares] == [150]


def test_another_model_of_the_first_ring_reserves_its_own_workspace(case: Case) -> None:
    case.offer.begin(replace(MEASURED, reserve_bytes=100), workspace=40)
    case.offer.share(ONE, replace(profile(1), memory_bytes=150))
    case.offer.end()

    case.offer.begin(replace(MEASURED, reserve_bytes=999), workspace=70)

    assert case.told[-1].reserve_bytes == 130


def test_a_ring_that_runs_out_of_memory_leaves_the_shares(case: Case) -> None:
    case.offer.share(ONE, replace(profile(1), memory_bytes=250))
    case.fail(OutOfMemory("", needed_bytes=10))
    case.member.trouble = None

    case.later[-1]()

    assert case.is_open
    assert Profile.decode(case.told[-1].encode()) == case.told[-1]
    told = case.told[-1]
    assert told.memory_bytes == 250 + MEASURED.reserve_bytes + 9  # the share, and what did fit


def test_a_ring_that_has_ended_publishes_nothing(case: Case) -> None:
    case.fail(ModelError("damaged"))
    case.offer.close()
    told = len(case.told)

    case.later.pop()()  # the backoff ends

    assert len(case.told) == told


def test_a_share_can_be_resized(case: Case) -> None:
    case.offer.resize(120)

    assert (case.offer.measured.memory_bytes, case.told[-1].memory_bytes) == (120, 120)


def test_a_share_that_no_record_can_hold_is_refused(case: Case) -> None:
    huge = replace(profile(1), memory_bytes=10, weights=(bytes(16),) * 1027)
    case.offer.share(ONE, huge)

    with pytest.raises(ModelError, match="one more model"):
        case.offer.share(OTHER, huge)

    assert [each.group for each in case.told[-1].shares] == [ONE]
