from meshllm.protocol.session.messages import Spent


def test_jobs_add_up_part_by_part() -> None:
    both = Spent(compute_us=100, serialise_us=10, queue_us=1) + Spent(200, 20, 2)

    assert both == Spent(compute_us=300, serialise_us=30, queue_us=3)
    assert both.total_us == 333
