from meshllm.errors import NotAuthorised
from meshllm.protocol.membership.twin import TWIN_S, Twin


def test_who_is_taken_for_another_for_long_enough_is_a_twin() -> None:
    twin = Twin()

    verdicts = [twin.dropped(is_twin=True, now=now) for now in (5.0, 5.0 + TWIN_S, 6.0 + TWIN_S)]

    assert verdicts[:2] == [None, None]
    assert isinstance(verdicts[2], NotAuthorised)


def test_another_reason_begins_anew() -> None:
    twin = Twin()
    twin.dropped(is_twin=True, now=0.0)
    twin.dropped(is_twin=False, now=1.0)

    assert twin.dropped(is_twin=True, now=9.0) is None
    assert twin.dropped(is_twin=True, now=10.0) is None
