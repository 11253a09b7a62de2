import resource
from collections.abc import Callable
from io import BytesIO, TextIOWrapper

import pytest

from meshllm.model.text import grammar_trial


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """The limits that it would set: this process keeps its own."""
    found: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "setrlimit", found.__setitem__)
    monkeypatch.setattr("os.nice", lambda _: 0)
    return found


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a text on stdin."""
    return lambda text: monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(text.encode())))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", '{"type": "integer"}'),
        ("json", '{"type": "nothing"}'),
        ("json", "{"),
        ("lark", "start: <[1]>"),
        ("lark", "start: nowhere"),
    ],
)
def test_it_ends_within_limits_whatever_it_is_given(
    limits: dict[int, tuple[int, int]], given: Callable[[str], None], kind: str, text: str
) -> None:
    given(text)

    grammar_trial.main(kind, 7)

    memory = grammar_trial.MEMORY_BYTES
    assert limits == {
        resource.RLIMIT_CPU: (7, 8),
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_CORE: (0, 0),
    }


def test_a_system_that_refuses_a_limit_still_tries(
    monkeypatch: pytest.MonkeyPatch, given: Callable[[str], None]
) -> None:
    def refuse(which: int, _: object) -> None:
        if which == resource.RLIMIT_AS:  # as macOS does
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr("os.nice", lambda _: 0)
    given('{"type": "integer"}')

    grammar_trial.main("json", 2)
