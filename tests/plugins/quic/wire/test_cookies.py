import random

import pytest

from meshllm_quic.wire.cookies import COOKIE_BYTES, WINDOW_S, Cookies
from meshllm_quic.wire.packets import ZERO_COOKIE

HOME = ("192.0.2.1", 4000)


def cookies(seed: int = 1) -> Cookies:
    return Cookies(random.Random(seed).randbytes)


@pytest.mark.parametrize("age", [0.0, 1.0, WINDOW_S - 1, WINDOW_S])
def test_a_cookie_is_valid_for_a_minute(age: float) -> None:
    cookie = cookies().make(HOME, 1000.0)

    assert len(cookie) == COOKIE_BYTES
    assert cookies().check(cookie, HOME, 1000.0 + age)


def test_a_cookie_expires() -> None:
    assert not cookies().check(cookies().make(HOME, 1000.0), HOME, 1000.0 + 2 * WINDOW_S)


@pytest.mark.parametrize("other", [("192.0.2.1", 4001), ("192.0.2.2", 4000), ("2001:db8::1", 4000)])
def test_a_cookie_is_for_one_address(other: tuple[str, int]) -> None:
    assert not cookies().check(cookies().make(HOME, 0.0), other, 0.0)


def test_a_cookie_is_valid_at_one_relay() -> None:
    assert not cookies(2).check(cookies(1).make(HOME, 0.0), HOME, 0.0)


def test_the_zero_cookie_is_invalid() -> None:
    assert not cookies().check(ZERO_COOKIE, HOME, 0.0)
