"""Parses the text of settings and options: memory sizes, times, addresses, lists."""

import re

from meshllm.errors import UserError

MAX_MEMORY = 1 << 50  # bytes of one node: 1 PiB
MAX_MS = 60_000.0  # time of a layer, a head or a link
MAX_DURATION_S = 100 * 365 * 86400  # a century, the longest of a ticket too

_NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"
_MEMORY = re.compile(rf"{_NUMBER} ?([KMGT]i?|)B")
_TIME = re.compile(rf"{_NUMBER} ?(us|ms|s)")
_UNITS: dict[str, int] = {
    "": 1,
    **{prefix: 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}i": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_DURATION = re.compile(r"(\d{1,9})(s|m|h|d)")
_DURATIONS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_memory(text: str) -> int:
    """Parse `8GiB` or `800MB` as bytes; raise `UserError` for anything else."""
    if found := _MEMORY.fullmatch(text):
        size = round(float(found[1]) * _UNITS[found[2]])
        if 0 < size <= MAX_MEMORY:
            return size
    raise UserError(f"Invalid memory size `{text}`", hint="write it as `8GiB` or `800MB`")


def parse_share(text: str) -> float | None:
    """Parse `50%` as 0.5; None without a percent sign; raise `UserError` for anything else."""
    if not text.endswith("%"):
        return None
    share = text[:-1].strip()
    if not (share.isdecimal() and len(share) <= 3 and 0 < int(share) <= 100):
        raise UserError(f"Invalid memory share `{text}`", hint="write `50%`, from 1% to 100%")
    return int(share) / 100


def parse_time(text: str | None) -> float | None:
    """Parse `20ms` or `1s` as seconds; raise `UserError` for anything else. None stays None."""
    if text is None:
        return None
    if found := _TIME.fullmatch(text):
        seconds = float(found[1]) * _SECONDS[found[2]]
        if seconds <= MAX_MS / 1e3:
            return seconds
    raise UserError(f"Invalid time `{text}`", hint=f"write `20ms`, up to {MAX_MS / 1e3:.0f} s")


def parse_duration(text: str) -> int:
    """Parse `90s`, `30m`, `1h` or `7d` as seconds; raise `UserError` for anything else."""
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * _DURATIONS[match[2]] if match else 0
    if not 0 < seconds <= MAX_DURATION_S:
        hint = "write it as `90s`, `30m`, `1h` or `7d`, up to a century"
        raise UserError(f"Invalid duration `{text}`", hint=hint)
    return seconds


def parse_address(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT` or `[IPV6]:PORT`; raise `UserError` for anything else."""
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    is_valid = colon and is_port and host
    if not is_valid or (":" in host and not is_bracketed):
        hint = "write it as `HOST:PORT`, such as `127.0.0.1:7780`, or `[IPV6]:PORT`"
        raise UserError(f"Invalid address `{text}`", hint=hint)
    return host.strip("[]"), int(port)


def listed(text: str | None) -> tuple[str, ...] | None:
    """Split a comma-separated list; None stays None."""
    words = (word.strip() for word in (text or "").split(","))
    return None if text is None else tuple(word for word in words if word)
