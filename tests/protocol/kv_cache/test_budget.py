"""Reservations never exceed a room, and kept sessions never block them."""

from hypothesis import given
from hypothesis import strategies as st

from meshllm.names import SessionId
from meshllm.protocol.kv_cache.budget import BLOCK, MAX_TOKENS, KvBudget
from tests.builders.rooms import room

A, B, C = (SessionId(name * 16) for name in (b"a", b"b", b"c"))


def test_a_session_reserves_if_it_fits_next_to_the_others() -> None:
    budget = KvBudget([room(3)])

    assert budget.reserve(A, 2 * BLOCK)
    assert not budget.reserve(B, 2 * BLOCK)
    assert budget.reserve(B, BLOCK)
    assert budget.live_bytes == 3 * BLOCK


def test_released_bytes_are_available_to_others() -> None:
    budget = KvBudget([room(2)])
    budget.reserve(A, 2 * BLOCK)

    budget.release(A)
    budget.release(A)

    assert budget.reserve(B, 2 * BLOCK)


def test_a_session_grows_by_whole_blocks_and_keeps_what_it_had() -> None:
    budget = KvBudget([room(2)])

    assert budget.reserve(A, 1)
    assert budget.reserved(A) == BLOCK
    assert budget.reserve(A, BLOCK + 1)
    assert not budget.reserve(A, 2 * BLOCK + 1)
    assert budget.reserved(A) == 2 * BLOCK
    assert budget.reserved(B) == 0


def test_the_tightest_rank_decides() -> None:
    budget = KvBudget([room(9), room(2), room(9)])

    assert budget.tokens == 2 * BLOCK
    assert not budget.reserve(A, 2 * BLOCK + 1)
    assert budget.live_bytes == 0


def test_what_cannot_be_lent_leaves_an_earlier_loan() -> None:
    budget, taken = KvBudget([room(4)]), list[str]()

    assert budget.lend(3 * BLOCK, lambda: taken.append("before"))
    assert not budget.lend(5 * BLOCK, lambda: taken.append("after"))

    assert budget.reserve(A, 2 * BLOCK)
    assert taken == ["before"]


def test_free_bytes_are_lent_until_a_session_needs_them() -> None:
    budget, taken = KvBudget([room(4), room(4)]), list[str]()
    budget.reserve(A, BLOCK)
    budget.keep(B, BLOCK)

    assert not budget.lend(2 * BLOCK + 1, lambda: taken.append("too much"))
    assert budget.lend(2 * BLOCK, lambda: taken.append("all"))
    assert budget.fits(3 * BLOCK)
    assert not budget.is_exceeded
    assert budget.reserve(A, 2 * BLOCK)
    assert taken == ["all"]
    assert budget.lend(BLOCK, lambda: taken.append("a block"))
    budget.keep(C, 1)
    budget.keep(B, 2 * BLOCK)
    assert taken == ["all", "a block"]


def test_a_loan_is_taken_back_once_and_only_for_sessions_that_have_no_room_beside_it() -> None:
    budget, taken = KvBudget([room(4)]), list[str]()
    assert budget.lend(2 * BLOCK, lambda: taken.append("all"))

    assert budget.reserve(A, 2 * BLOCK)
    assert not taken
    assert budget.reserve(A, 3 * BLOCK)
    assert budget.reserve(A, 4 * BLOCK)
    assert taken == ["all"]
    assert not budget.is_exceeded


def test_a_loan_that_was_refused_takes_no_room() -> None:
    budget = KvBudget([room(4)])
    budget.reserve(A, 4 * BLOCK)

    assert not budget.lend(1, lambda: None)
    assert not budget.is_exceeded


def test_a_loan_that_has_ended_is_not_taken_back() -> None:
    budget, taken = KvBudget([room(4)]), list[str]()
    assert budget.lend(4 * BLOCK, lambda: taken.append("all"))

    budget.end_loan()

    assert budget.reserve(A, 4 * BLOCK)
    assert not budget.is_exceeded
    assert not taken


def test_bytes_are_lent_by_this_rank_alone() -> None:
    budget = KvBudget([room(9), room(1)])

    assert budget.lend(5 * BLOCK, lambda: None)
    assert budget.reserve(A, BLOCK)


def test_a_state_of_fixed_size_counts_for_each_session() -> None:
    budget = KvBudget([room(4, fixed=BLOCK)])

    assert budget.reserve(A, BLOCK)
    assert budget.reserve(B, BLOCK)
    assert not budget.reserve(C, 1)


def test_only_the_largest_copy_counts_on_top_of_the_sessions() -> None:
    budget = KvBudget([room(6, growth=1)])

    assert budget.reserve(A, 2 * BLOCK)
    assert budget.reserve(B, 2 * BLOCK)
    assert not budget.reserve(C, BLOCK)


def test_kept_sessions_never_block_a_running_one() -> None:
    budget = KvBudget([room(3)])
    over = []
    for step in (
        lambda: budget.keep(A, 2 * BLOCK),
        lambda: budget.reserve(B, 2 * BLOCK),
        lambda: budget.drop(A),
        lambda: budget.drop(A),
    ):
        assert budget.fits(BLOCK)
        step()
        over.append(budget.is_exceeded)

    assert over == [False, True, False, False]
    assert budget.kept_bytes == 0


def test_the_room_left_is_given_in_tokens() -> None:
    budget = KvBudget([room(5)])
    budget.reserve(A, 2 * BLOCK)
    budget.keep(B, BLOCK)

    assert (budget.tokens, budget.left(A), budget.left(C)) == (5 * BLOCK, 5 * BLOCK, 3 * BLOCK)
    assert budget.kept_bytes == BLOCK


def test_rooms_may_change_as_long_as_what_runs_fits() -> None:
    budget, taken = KvBudget([room(9), room(9)]), list[str]()
    budget.reserve(A, 2 * BLOCK)
    budget.keep(B, 3 * BLOCK)
    budget.lend(2 * BLOCK, lambda: taken.append("all"))

    assert budget.resize([7 * BLOCK, 6 * BLOCK])
    assert (budget.is_exceeded, taken) == (False, [])
    assert budget.resize([6 * BLOCK, 6 * BLOCK])
    assert (budget.is_exceeded, taken) == (False, ["all"])
    assert budget.resize([4 * BLOCK, 4 * BLOCK], longest=4 * BLOCK)
    assert budget.is_exceeded
    assert budget.fits(2 * BLOCK)
    assert not budget.fits(2 * BLOCK + 1)
    assert not budget.resize([3 * BLOCK, 3 * BLOCK], longest=4 * BLOCK)
    assert not budget.resize([9 * BLOCK, BLOCK])
    assert [each.total for each in budget.rooms] == [4 * BLOCK] * 2
    assert budget.resize([9 * BLOCK, 9 * BLOCK], longest=9 * BLOCK)
    assert not budget.is_exceeded


def test_weights_that_leave_nothing_leave_no_room() -> None:
    budget = KvBudget([room(-1)])

    assert budget.tokens == 0
    assert not budget.holds(1)


def test_without_ranks_there_is_no_limit() -> None:
    budget = KvBudget(())

    assert budget.reserve(A, MAX_TOKENS)
    assert budget.tokens == MAX_TOKENS


@given(
    st.lists(
        st.tuples(st.sampled_from((A, B, C)), st.integers(0, 5 * BLOCK), st.sampled_from("rrrkdl"))
    )
)
def test_reservations_never_exceed_a_room(steps: list[tuple[SessionId, int, str]]) -> None:
    rooms = [room(7, growth=1), room(8, fixed=100)]
    budget = KvBudget(rooms)

    for session, tokens, what in steps:
        match what:
            case "r":
                budget.reserve(session, tokens)
            case "k":
                budget.keep(session, tokens)
            case "d":
                budget.drop(session)
            case _:
                budget.release(session)
        costs = [[each.cost(budget.reserved(one)) for one in (A, B, C)] for each in rooms]
        held = [[cost for cost in row if cost.growth or cost.held > 100] for row in costs]
        for each, row in zip(rooms, held, strict=True):
            growth = max((cost.growth for cost in row), default=0)
            assert sum(cost.held for cost in row) + growth <= each.total


def test_a_session_may_grow_as_far_as_all_can_still_end() -> None:
    budget = KvBudget([room(9), room(6)])

    assert budget.reserve(A, BLOCK, 5 * BLOCK)
    assert budget.reserve(B, BLOCK, 5 * BLOCK)
    assert not budget.reserve(C, BLOCK, 5 * BLOCK)  # none could end
    assert budget.reserve(A, 3 * BLOCK)
    assert not budget.reserve(B, 2 * BLOCK)
    assert budget.fits(BLOCK, B)
    assert budget.reserve(A, 5 * BLOCK)
    budget.release(A)
    assert budget.reserve(B, 2 * BLOCK)


def test_one_that_ends_first_may_give_room_to_another() -> None:
    budget = KvBudget([room(6)])
    budget.reserve(A, 3 * BLOCK, 4 * BLOCK)

    assert budget.reserve(B, 2 * BLOCK, 5 * BLOCK)  # once A has ended
    assert not budget.reserve(C, BLOCK, 2 * BLOCK)  # none could end


def test_there_is_not_less_room_than_all_need_to_end() -> None:
    budget = KvBudget([room(6)])
    budget.reserve(A, BLOCK, 4 * BLOCK)
    budget.reserve(B, BLOCK, 3 * BLOCK)

    assert not budget.resize([3 * BLOCK])
    assert budget.resize([4 * BLOCK])


def test_the_copy_of_a_layer_counts_for_one_alone_and_beside_kept_ones() -> None:
    budget = KvBudget([room(4, growth=1)])

    assert budget.holds(2 * BLOCK)
    assert not budget.holds(2 * BLOCK + 1)
    budget.reserve(A, BLOCK)
    assert budget.has_room(2 * BLOCK)
    assert not budget.has_room(2 * BLOCK + 1)
