from tests.builders.oracle import Oracle


def wrong(acceptance: float, seed: int = 0) -> int:
    text = list(range(1000))
    drafter = Oracle(text, acceptance, seed).begin()
    return sum(draft != token for draft, token in zip(drafter.draft(1000), text, strict=True))


def test_the_acceptance_rate_is_the_requested_one() -> None:
    assert (wrong(1.0), wrong(0.0)) == (0, 1000)
    assert 240 < wrong(0.7) < 360


def test_drafts_follow_the_text_and_end_with_it() -> None:
    drafter = Oracle([5, 6, 7, 8], 1.0).begin()

    drafter.extend([5, 6])

    assert (drafter.look(), drafter.draft(8)) == (2, (7, 8))
    drafter.extend([7, 8])
    assert (drafter.look(), drafter.draft(8)) == (None, ())


def test_a_run_can_be_repeated() -> None:
    assert Oracle(range(99), 0.5, 3).begin().draft(99) == Oracle(range(99), 0.5, 3).begin().draft(
        99
    )
