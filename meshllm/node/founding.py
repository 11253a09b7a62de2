"""Creating and amending the charter of a mesh from the options of a node."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from meshllm.errors import ModelError, UserError
from meshllm.model.shape import ModelShape
from meshllm.names import Digest, NodeId, Quant
from meshllm.node.options import NodeOptions
from meshllm.node.ring.shape import CONTEXT, plan_shape
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.planning.policies import find_policy
from meshllm.protocol.session.messages import DType
from meshllm.protocol.trust.identity import parse_node, show

SELF = "self"
"""Names this node in ``entry``."""
SHORT_LETTERS = 7  # of an id in its short form


def found_charter(options: NodeOptions, shape: ModelShape, config_digest: Digest) -> Charter:
    """Create the first charter of a mesh, for a model."""
    return Charter(
        version=1,
        shape=plan_shape(shape, options.context or CONTEXT),
        dtype=DType[shape.dtype.upper()],
        config_digest=config_digest,
        quant=options.inference.quant or Quant.NONE,
    )


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


def resolve_names(texts: Iterable[str], profiles: Mapping[NodeId, Profile]) -> Names:
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


def names_in(options: NodeOptions) -> tuple[str, ...]:
    """Return the names of nodes in the options."""
    return *(options.exclude or ()), *(options.prefer or ()), *(options.entry or ())


def with_own_entry(options: NodeOptions, me: NodeId) -> NodeOptions:
    """Return the options with this node's id among those of ``entry``, in place of ``self``."""
    if not options.entry:
        return options
    others = (name for name in options.entry if name != SELF)
    return replace(options, entry=(show(me), *others))


def amend(
    charter: Charter, options: NodeOptions, profiles: Mapping[NodeId, Profile], longest: int
) -> Charter:
    """Apply the options to the charter; return the same charter if nothing changes.

    The context is capped at ``longest`` tokens, the limit of the model. While a name is unknown or
    ambiguous, the nodes excluded or preferred before are kept, since one of them may be meant.

    Raises:
        UserError: the policy is unknown.
    """
    changes: dict[str, object] = {}
    if options.policy is not None:
        find_policy(options.policy)
        changes["policy"] = options.policy
    if options.members is not None:
        changes["members"] = options.members
    if options.exclude is not None:
        changes["exclude"] = _nodes(options.exclude, profiles, charter.exclude)
    if options.prefer is not None:
        changes["prefer"] = _nodes(options.prefer, profiles, charter.prefer)
    if options.entry is not None:  # none of before: an unknown name must not let others in
        changes["entries"] = _nodes(options.entry, profiles, ())
    if options.context is not None:
        changes["shape"] = replace(charter.shape, context=min(options.context, longest))
    changed = replace(charter, **changes)  # type: ignore[arg-type]  # names and types as above
    return charter if changed == charter else replace(changed, version=charter.version + 1)


def refuse_other(
    charter: Charter, model: str, config_digest: Digest, quant: Quant | None = None
) -> None:
    """Raise `ModelError` if the model or its quantisation differs from the mesh's."""
    if quant is not None and quant != charter.quant:
        raise ModelError(
            f"The mesh uses `--quant {charter.quant}`, not `{quant}`",
            hint="leave out `--quant`, or begin another mesh with it",
        )
    if config_digest != charter.config_digest:
        raise ModelError(
            f"The mesh serves `{charter.shape.name}`; `{model}` has a different configuration",
            hint="leave out `--model`, or give the folder with the same model",
        )


def find_node(text: str, profiles: Mapping[NodeId, Profile]) -> NodeId:
    """Find a node by its id, a prefix of its id, or its name.

    Raises:
        UserError: no node or several nodes match.
    """
    match _find(text, profiles):
        case (node,):
            return node
        case ():
            return parse_node(text)
        case nodes:
            raise UserError(f"{len(nodes)} nodes match `{text}`", hint="give the whole id")


def _nodes(
    texts: Iterable[str], profiles: Mapping[NodeId, Profile], before: Iterable[NodeId]
) -> tuple[NodeId, ...]:
    names = resolve_names(texts, profiles)
    return tuple(sorted({*names.resolved, *(() if names.is_complete else before)}))


def _find(text: str, profiles: Mapping[NodeId, Profile]) -> tuple[NodeId, ...]:
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
