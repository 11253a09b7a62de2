"""Which transports are installed, and how to get one by name; knows none of them itself.

Listing reads the metadata of entry points and imports nothing; only the transport that is chosen
is imported, so that a broken plugin harms nobody who does not ask for it.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Self

from meshllm.errors import PluginError
from meshllm.transport.contract import Transport

GROUP = "meshllm.transports"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """One transport that an installed distribution offers."""

    name: str
    distribution: str
    version: str
    value: str
    """``module:attribute`` of what makes the transport."""


class Registry:
    """The transports on offer, by name."""

    def __init__(self, points: Iterable[EntryPoint]) -> None:
        self._points = sorted(points, key=lambda point: point.name)

    @classmethod
    def discover(cls) -> Self:
        """Read what is installed in this environment."""
        return cls(entry_points(group=GROUP))

    def names(self) -> list[str]:
        """List the names on offer, in order."""
        return sorted({point.name for point in self._points})

    def describe(self) -> list[Offer]:
        """List every offer with the distribution it comes from; a name may be offered twice."""
        return [_offer(point) for point in self._points]

    def load(self, name: str) -> Transport:
        """Import and make the transport of that name.

        Raises:
            PluginError: no distribution offers it, several do, or it is broken.
        """
        return _make(self._find(name))

    def dialing(self, schemes: Collection[str]) -> tuple[Transport, ...]:
        """Make transports that dial addresses of these schemes, as far as there are any.

        A broken transport is passed over: nobody asked for it by name.
        """
        missing, found = set(schemes), list[Transport]()
        for name in self.names():
            if not missing:
                break
            try:
                transport = self.load(name)
            except PluginError as error:
                logger.warning("%s", error)
                continue
            if missing.intersection(transport.schemes):
                found.append(transport)
                missing.difference_update(transport.schemes)
        return tuple(found)

    def _find(self, name: str) -> EntryPoint:
        points = [point for point in self._points if point.name == name]
        if not points:
            raise PluginError(f"No transport is named `{name}`", hint=self._suggest(name))
        if len(points) > 1:
            offers = ", ".join(_source(point) for point in points)
            raise PluginError(
                f"{len(points)} distributions offer the transport `{name}`: {offers}",
                hint="uninstall all but one of them",
            )
        return points[0]

    def _suggest(self, name: str) -> str:
        installed = ", ".join(f"`{other}`" for other in self.names()) or "none"
        close = get_close_matches(name, self.names(), n=1)
        return "".join(f"did you mean `{other}`? " for other in close) + f"installed: {installed}"


def _make(point: EntryPoint) -> Transport:
    try:
        factory: Callable[[], object] = point.load()
        transport = factory()
    except Exception as error:  # foreign code, whatever it does at import
        raise PluginError(
            f"Transport `{point.name}` of {_source(point)} is broken: {error}",
            hint=f"update or uninstall `{_offer(point).distribution}`",
        ) from error
    if not isinstance(transport, Transport) or transport.name != point.name:
        raise PluginError(
            f"`{point.value}` of {_source(point)} makes no transport named `{point.name}`",
            hint="a transport has what `meshllm.transport.contract.Transport` has",
        )
    return transport


def _offer(point: EntryPoint) -> Offer:
    dist = point.dist
    name, version = (dist.name, dist.version) if dist else ("unknown", "0")
    return Offer(point.name, name, version, point.value)


def _source(point: EntryPoint) -> str:
    offer = _offer(point)
    return f"`{offer.distribution}` {offer.version}"
