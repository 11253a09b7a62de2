"""Import of transformers and torch without the parts that are not used here.

transformers decorates functions for torch's compiler, and checks whether each tensor is a DTensor;
torch itself, on meta, checks whether sizes are symbolic. For that they import the compiler,
distributed tensors and sympy: half of the import time, and 100 MB. Here nothing is compiled,
distributed or symbolic, so stub modules temporarily replace them.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from meshllm.config import cache_path
from meshllm.model.json_cache import load_cached, store_cached

_MASKS = "torch._dynamo._trace_wrapped_higher_order_op"
_CONDITIONS = (
    "expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious",
    "statically_known_true",
)  # fmt: skip
"""Functions that evaluate a symbolic condition: `bool`, if sizes are ints."""
_PACKAGES = {"torch._dynamo", "sympy"}
_UTILS = "transformers.utils.import_utils"
_SCAN = "create_import_structure_from_path"
_EXPORTS = "fetch__all__"


class _Stub(ModuleType):
    """A stub module with a few names; any other name is taken from the real module."""

    __file__ = None  # `inspect` reads it from every module

    def __getattr__(self, name: str) -> Any:
        if name == "__path__" and self.__name__ not in _PACKAGES:
            raise AttributeError(name)
        _remove_stubs()
        return getattr(import_module(self.__name__), name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Import transformers, and build models on meta, without the unused parts.

    If torch's compiler is imported already, nothing changes. It can be imported afterwards.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    sys.modules.update(_stubs())
    try:
        _import_whole()
        yield
    finally:
        _remove_stubs()


def _remove_stubs() -> None:
    """Remove the stubs, so that later imports load the real modules."""
    for name in _STUBS:
        if isinstance(sys.modules.get(name), _Stub):
            del sys.modules[name]


def _stubs() -> dict[str, _Stub]:
    modules = {name: _Stub(name) for name in _STUBS if name not in sys.modules}
    for name, module in modules.items():
        vars(module).update(_STUBS[name])
    return modules


def _are_equal(one: Any, other: Any) -> bool:
    """Compare numbers, or sequences of them: a shape is a tuple or a list."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return list(one) == list(other)
    return bool(one == other)


def _unchanged(marked: Any = None, *_: Any, **__: Any) -> Any:
    """Stub of a decorator for the compiler: return its argument."""
    return _unchanged if marked is None else marked


def _index_masks() -> Any:
    """Make the real object, which the masks of a few families need."""
    return import_module(_MASKS).TransformGetItemToIndex()


_STUBS: dict[str, dict[str, Any]] = {
    "torch._dynamo": dict.fromkeys(
        ("allow_in_graph", "assume_constant_result", "disable", "mark_static_address"),
        _unchanged,
    ),
    "torch.distributed.tensor": {"DTensor": _Stub},  # no tensor is an instance
    _MASKS: {"TransformGetItemToIndex": _index_masks},
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(_CONDITIONS, bool),
        "guarding_hint_or_throw": int,
        "has_guarding_hint": lambda _: True,
        "is_nested_int": lambda _: False,
        "sym_and": lambda *terms: all(terms),
        "sym_eq": _are_equal,
        "sym_or": lambda *terms: any(terms),
    },
    "torch.utils._sympy.functions": {"Max": max},
    "sympy": {"Basic": _Stub},  # no size is an instance
}
"""The stub modules, a few of thousands that are imported, and the names in each."""


def _import_whole() -> None:
    """Import transformers with torch.distributed reported as unavailable, which it checks once.

    It scans the names in its 1,600 model modules, twice; the result is cached on disk.
    """
    if "transformers" in sys.modules:
        return
    spread, hook = torch.distributed.is_available, _Hook()
    torch.distributed.is_available = lambda: False
    sys.meta_path.insert(0, hook)
    try:
        utils = import_module(_UTILS)
        utils.is_torch_distributed_available()
        import_module("transformers.models")
    finally:
        sys.meta_path.remove(hook)
        torch.distributed.is_available = spread
    setattr(utils, _SCAN, hook.scan)


class _Hook(MetaPathFinder):
    """Replaces a function of transformers once it is defined: importing the rest calls it."""

    scan: Callable[[Path], Any]

    def find_spec(self, name: str, path: Sequence[str] | None, _: Any = None) -> ModuleSpec | None:
        """Find the module that defines the function, and no other."""
        if name != _UTILS or not (spec := PathFinder.find_spec(name, path)) or not spec.loader:
            return None
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            self.scan = vars(module)[_SCAN]
            setattr(module, _SCAN, self.structure)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec

    def structure(self, path: str | Path) -> Any:
        """Return the names that modules of a package define, cached per transformers version."""
        folder = Path(path).parent if Path(path).is_file() else Path(path)
        key = "import structure", version("transformers"), str(folder), folder.stat().st_mtime_ns
        cache = cache_path()
        with suppress(TypeError, ValueError, LookupError, AttributeError):  # damaged
            return dict(_structure_from_json(load_cached(cache, *key)).items())
        utils = sys.modules[_UTILS]
        exports = getattr(utils, _EXPORTS)
        setattr(utils, _SCAN, self.scan)  # it calls itself for subfolders
        setattr(utils, _EXPORTS, lambda content: exports(_last_exports(content)))
        try:
            structure = self.scan(folder)
        finally:
            setattr(utils, _SCAN, self.structure)
            setattr(utils, _EXPORTS, exports)
        store_cached(cache, _structure_to_json(structure), *key)
        return structure


def _last_exports(content: str) -> str:
    """Return the part of a module that the function needs, which splits all it gets into lines.

    It reads the last line that begins with ``__all__``, and those after it.
    """
    return content[content.rfind("\n__all__") + 1 :]


def _structure_to_json(value: Any) -> Any:
    """Encode dicts, keyed by names or sets of backends, as pairs, and sets of names as lists."""
    if isinstance(value, Mapping):
        pairs = value.items()
        return {"pairs": [[_names(key), _structure_to_json(each)] for key, each in pairs]}
    return sorted(value)


def _structure_from_json(value: Any) -> Any:
    if isinstance(value, dict):
        pairs = ((key, _structure_from_json(each)) for key, each in value["pairs"])
        return {key if isinstance(key, str) else frozenset(key): each for key, each in pairs}
    return set(value)


def _names(key: str | frozenset[str]) -> str | list[str]:
    return key if isinstance(key, str) else sorted(key)
