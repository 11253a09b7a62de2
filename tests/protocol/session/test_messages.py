from meshllm.names import SessionId
from meshllm.protocol.session.messages import Cancel, Forward, JobTimes, Resume

SESSION, BASE = (SessionId(name * 16) for name in (b"s", b"b"))


def test_jobs_add_up_part_by_part() -> None:
    both = JobTimes(compute_us=100, serialise_us=10, queue_us=1) + JobTimes(200, 20, 2)

    assert both == JobTimes(compute_us=300, serialise_us=30, queue_us=3)
    assert both.total_us == 333


def test_a_cancellation_overtakes_rows_but_no_rows_overtake_what_they_continue() -> None:
    assert Forward(Cancel(SESSION, 1, 2)).control
    assert not Forward(Resume(SESSION, 1, BASE, 3, whole=True)).control
