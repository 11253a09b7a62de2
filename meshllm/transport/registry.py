"""The registry of installed transport plugins.

Listing reads entry point metadata and imports nothing; a plugin is imported only when it is
loaded, so a broken one does not affect the others.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Self

from meshllm.errors import PluginError, foreign_code
from meshllm.transport.contract import Transport

GROUP = "meshllm.transports"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InstalledTransport:
    """A transport that an installed distribution provides."""

    name: str
    distribution: str
    version: str
    value: str
    """The factory of the transport, as ``module:attribute``."""


class Registry:
    """The available transports, by name."""

    def __init__(self, points: Iterable[EntryPoint]) -> None:
        self._points = sorted(points, key=lambda point: point.name)

    @classmethod
    def discover(cls) -> Self:
        """Read the entry points of this environment."""
        return cls(entry_points(group=GROUP))

    def names(self) -> list[str]:
        """List the available names, sorted."""
        return sorted({point.name for point in self._points})

    def describe(self) -> list[InstalledTransport]:
        """List every entry point with its distribution; a name may occur twice."""
        return [_offer(point) for point in self._points]

    def load(self, name: str) -> Transport:
        """Import and instantiate the transport of that name.

        Raises:
            PluginError: no distribution provides it, several do, or it is broken.
        """
        return _make(self._find(name))

    def dialing(self, schemes: Collection[str]) -> tuple[Transport, ...]:
        """Instantiate transports that dial addresses of these schemes, as far as available.

        A broken transport is logged and skipped: it was not requested by name.
        """
        missing, found = set(schemes), list[Transport]()
        for name in self.names():
            if not missing:
                break
            for transport in self._loadable([name]):
                if missing.intersection(transport.schemes):
                    found.append(transport)
                    missing.difference_update(transport.schemes)
        return tuple(found)

    def usable(self, names: Sequence[str]) -> tuple[Transport, ...]:
        """Instantiate those of these transports that load; any other is logged and skipped.

        Raises:
            PluginError: none loads.
        """
        return tuple(self._loadable(names)) or tuple(map(self.load, names))

    def _loadable(self, names: Sequence[str]) -> Iterator[Transport]:
        for name in names:
            try:
                yield self.load(name)
            except PluginError as error:
                logger.warning("%s", error)

    def _find(self, name: str) -> EntryPoint:
        points = [point for point in self._points if point.name == name]
        if not points:
            raise PluginError(f"Unknown transport `{name}`", hint=self._suggest(name))
        if len(points) > 1:
            offers = ", ".join(_source(point) for point in points)
            raise PluginError(
                f"{len(points)} distributions provide the transport `{name}`: {offers}",
                hint="uninstall all but one of them",
            )
        return points[0]

    def _suggest(self, name: str) -> str:
        installed = ", ".join(f"`{other}`" for other in self.names()) or "none"
        close = get_close_matches(name, self.names(), n=1)
        return "".join(f"did you mean `{other}`? " for other in close) + f"installed: {installed}"


def _make(point: EntryPoint) -> Transport:
    def broken(error: Exception) -> PluginError:
        return PluginError(
            f"Transport `{point.name}` of {_source(point)} is broken: {error}",
            hint=f"update or uninstall `{_offer(point).distribution}`",
        )

    with foreign_code(broken, expected=()):
        factory: Callable[[], object] = point.load()
        transport = factory()
    if not isinstance(transport, Transport) or transport.name != point.name:
        raise PluginError(
            f"`{point.value}` of {_source(point)} is not a transport named `{point.name}`",
            hint="a transport implements `meshllm.transport.contract.Transport`",
        )
    return transport


def _offer(point: EntryPoint) -> InstalledTransport:
    dist = point.dist
    name, version = (dist.name, dist.version) if dist else ("unknown", "0")
    return InstalledTransport(point.name, name, version, point.value)


def _source(point: EntryPoint) -> str:
    offer = _offer(point)
    return f"`{offer.distribution}` {offer.version}"
