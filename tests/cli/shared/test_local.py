"""Imports of heavy modules."""

import gc
import linecache

from meshllm.cli.shared.local import import_heavy


def test_modules_are_hidden_from_the_garbage_collector() -> None:
    before = gc.get_freeze_count()
    try:
        import_heavy("json")
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_sources_that_were_read_on_import_are_not_kept() -> None:
    assert linecache.getlines(__file__)
    try:
        import_heavy("json")
        assert linecache.cache == {}
    finally:
        gc.unfreeze()
