"""Imports of heavy modules; what they hide from the garbage collector stays hidden."""

import gc
import linecache

from meshllm.cli.shared.local import import_heavy


def test_modules_are_hidden_from_the_garbage_collector() -> None:
    before = gc.get_freeze_count()

    import_heavy("json")

    assert gc.get_freeze_count() > before


def test_sources_that_were_read_on_import_are_not_kept() -> None:
    assert linecache.getlines(__file__)

    import_heavy("json")

    assert linecache.cache == {}
