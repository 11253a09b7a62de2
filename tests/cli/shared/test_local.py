"""What is done once for every ring inside a process."""

import gc

from meshllm.cli.shared.local import import_heavy


def test_modules_are_no_business_of_the_collector() -> None:
    before = gc.get_freeze_count()
    try:
        import_heavy("json")
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
