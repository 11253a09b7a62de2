"""What the mesh agrees on, from what the owner of one node wants; knows nothing about links."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshllm.errors import ModelError, UserError
from meshllm.model.capacity import ModelShape
from meshllm.names import Digest, NodeId, Quant
from meshllm.node.options import NodeOptions
from meshllm.node.shape import CONTEXT, plan_shape
from meshllm.protocol.charter import Charter
from meshllm.protocol.identity import parse_node, show
from meshllm.protocol.messages import DType
from meshllm.protocol.plan import Policy
from meshllm.protocol.records import Profile

SHORT_LETTERS = 7  # of an id, as it is shown in short


class NoNode(UserError):
    """Nobody is called so, and it is no id."""


def found_charter(options: NodeOptions, shape: ModelShape, config_digest: Digest) -> Charter:
    """Write the first charter of a mesh, for a model."""
    return Charter(
        version=1,
        shape=plan_shape(shape, options.context or CONTEXT),
        dtype=DType[shape.dtype.upper()],
        config_digest=config_digest,
        quant=options.inference.quant or Quant.NONE,
    )


def amend(
    charter: Charter, options: NodeOptions, profiles: Mapping[NodeId, Profile], longest: int
) -> Charter:
    """Change what the options ask for; the same charter when they ask for nothing new.

    A session has at most ``longest`` tokens, as the model takes. Nodes that are named and not known
    yet are left out; see `unknown`.

    Raises:
        UserError: several nodes have the name.
    """
    changes: dict[str, object] = {}
    if options.policy is not None:
        changes["policy"] = Policy(options.policy)
    if options.members is not None:
        changes["members"] = options.members
    if options.exclude is not None:
        changes["exclude"] = _nodes(options.exclude, profiles, charter.exclude)
    if options.prefer is not None:
        changes["prefer"] = _nodes(options.prefer, profiles, charter.prefer)
    if options.context is not None:
        changes["shape"] = replace(charter.shape, context=min(options.context, longest))
    changed = replace(charter, **changes)  # type: ignore[arg-type]  # names and types as above
    return charter if changed == charter else replace(changed, version=charter.version + 1)


def refuse_other(
    charter: Charter, model: str, config_digest: Digest, quant: Quant | None = None
) -> None:
    """Raise `ModelError` when a model is not the one of the mesh, or to be held otherwise."""
    if quant is not None and quant != charter.quant:
        raise ModelError(
            f"The mesh holds weights as `--quant {charter.quant}`, not `{quant}`",
            hint="leave out `--quant`, or begin another mesh with it",
        )
    if config_digest != charter.config_digest:
        raise ModelError(
            f"The mesh serves `{charter.shape.name}`, and `{model}` has another configuration",
            hint="leave out `--model`, or give the folder with the same model",
        )


def find_node(text: str, profiles: Mapping[NodeId, Profile]) -> NodeId:
    """Find a node by its id, the beginning of its id, or its name.

    Raises:
        UserError: none or several fit.
    """
    known = {
        node
        for node, profile in profiles.items()
        if profile.name == text
        or (len(text) >= SHORT_LETTERS and show(node).startswith(text.lower()))
    }
    if len(known) == 1:
        return known.pop()
    if not known:
        try:
            return parse_node(text)
        except UserError as error:
            raise NoNode(str(error), hint=error.hint) from None
    raise UserError(f"{len(known)} nodes are called `{text}`", hint="give the whole id")


def unknown(options: NodeOptions, profiles: Mapping[NodeId, Profile]) -> list[str]:
    """List the names in the options that no node has yet."""
    wanted = (*(options.exclude or ()), *(options.prefer or ()))
    return [text for text in wanted if not _find(text, profiles)]


def _nodes(
    texts: Iterable[str], profiles: Mapping[NodeId, Profile], before: Iterable[NodeId]
) -> tuple[NodeId, ...]:
    """Name the nodes; while one is not known, those of before may be it."""
    found = [_find(text, profiles) for text in texts]
    kept = before if None in found else ()
    return tuple(sorted({*kept, *(node for node in found if node)}))


def _find(text: str, profiles: Mapping[NodeId, Profile]) -> NodeId | None:
    """Find a node by what it is called; None for a name that nobody has."""
    try:
        return find_node(text, profiles)
    except NoNode:
        return None
