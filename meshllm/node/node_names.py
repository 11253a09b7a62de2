"""The names of nodes: found in options and requests, and shown to people."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from meshllm.errors import UserError
from meshllm.names import SHORT_LETTERS, NodeId, parse_node, short, show
from meshllm.protocol.membership.records import Profile

LONG = 50  # characters; so many are meant to be the 63 of an id
_LISTED = "see `meshllm ring status`, or `meshllm ring members`"
MAX_NAMES = 4  # in a line of a terminal; a mesh may have hundreds of nodes

Profiles: TypeAlias = Mapping[NodeId, Profile]


@dataclass(frozen=True, slots=True)
class Names:
    """Node names resolved to ids."""

    resolved: tuple[NodeId, ...]
    unknown: tuple[str, ...]
    """Names of no known node."""
    ambiguous: tuple[str, ...]
    """Names of several nodes; not resolved, since any node can choose any name."""

    @property
    def is_complete(self) -> bool:
        """Whether every name is resolved."""
        return not self.unknown and not self.ambiguous


def resolve_names(texts: Iterable[str], profiles: Profiles) -> Names:
    """Resolve names, ids, and prefixes of ids; never raise, whatever names nodes have chosen."""
    resolved, unknown, ambiguous = set[NodeId](), list[str](), list[str]()
    for text in texts:
        match _find(text, profiles):
            case (node,):
                resolved.add(node)
            case ():
                unknown.append(text)
            case _:
                ambiguous.append(text)
    return Names(tuple(sorted(resolved)), tuple(unknown), tuple(ambiguous))


def find_node(text: str, profiles: Profiles) -> NodeId:
    """Find a node by its id, a prefix of its id, or its name.

    Raises:
        UserError: no node or several nodes match.
    """
    match _find(text, profiles):
        case (node,):
            return node
        case () if len(text) >= LONG:
            return parse_node(text)  # which says what is wrong with the id
        case ():
            raise UserError(f"No node has the name or id `{text[:80]}`", hint=_LISTED)
        case nodes:
            raise UserError(f"{len(nodes)} nodes match `{text}`", hint="give the whole id")


def name_of(node: NodeId, profiles: Profiles) -> str:
    """Return the name of a node; its short id if it has none, or is unknown."""
    profile = profiles.get(node)
    return profile.name if profile and profile.name else short(node)


def names_of(nodes: Collection[NodeId], profiles: Profiles) -> str:
    """List nodes by name; those that share one have their short ids, too."""
    names = {node: name_of(node, profiles) for node in nodes}
    counts = Counter(names.values())
    texts = sorted(
        name if counts[name] == 1 else f"{name} ({short(node)})" for node, name in names.items()
    )
    more = len(texts) - MAX_NAMES
    return ", ".join(texts[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _find(text: str, profiles: Profiles) -> tuple[NodeId, ...]:
    """Return the nodes that match a text; a whole id matches its node only."""
    try:
        return (parse_node(text),)
    except UserError:
        is_id = len(text) >= SHORT_LETTERS
        return tuple(
            node
            for node, profile in profiles.items()
            if profile.name == text or (is_id and show(node).startswith(text.lower()))
        )
