"""Imports of heavy modules."""

import gc

from meshllm.cli.shared.local import import_heavy


def test_modules_are_hidden_from_the_garbage_collector() -> None:
    before = gc.get_freeze_count()
    try:
        import_heavy("json")
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
