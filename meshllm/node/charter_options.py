"""Creating and amending the charter of a mesh from the options of a node."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, NoReturn

from meshllm.errors import ModelError, ModelMissing, UserError
from meshllm.model.shape import ModelShape
from meshllm.names import Digest, NodeId, Quant, show
from meshllm.node.node_names import Profiles, resolve_names
from meshllm.node.options import ModelOptions, NodeOptions
from meshllm.node.ring.shape import CONTEXT, plan_shape
from meshllm.protocol.membership.charter import (
    MAX_ALIAS_BYTES,
    MAX_ALIASES,
    MAX_REPLICAS,
    MAX_SERVED,
    Charter,
    unique_name,
)
from meshllm.protocol.membership.records import MAX_MEMBERS
from meshllm.protocol.planning.plan import ModelSizes
from meshllm.protocol.planning.policies import find_policy
from meshllm.protocol.session.codec import MAX_POSITION
from meshllm.protocol.session.messages import DType

SELF = "self"
"""Names this node in ``entry``."""


def create_charter(options: NodeOptions, shape: ModelShape, config_digest: Digest) -> Charter:
    """Create the first charter of a mesh, for a model."""
    return Charter(
        version=1,
        shape=plan_shape(shape, options.context or CONTEXT),
        dtype=DType[shape.dtype.upper()],
        config_digest=config_digest,
        quant=options.inference.quant or Quant.NONE,
    )


def refuse_layers(options: NodeOptions, shape: ModelShape | ModelSizes) -> None:
    """Raise `UserError` if this node is to hold layers that the model of its mesh lacks."""
    span = options.layers
    if span and span.stop > shape.layers:
        raise UserError(
            f"The layers `{span}` end above the {shape.layers} layers of `{shape.name}`",
            hint=f"choose a span within `0:{shape.layers}`",
        )


def names_in(options: NodeOptions) -> tuple[str, ...]:
    """Return the names of nodes in the options."""
    return *(options.exclude or ()), *(options.prefer or ()), *(options.entry or ())


def with_own_entry(options: NodeOptions, me: NodeId, *, is_founder: bool) -> NodeOptions:
    """Return the options with this node's id among those of ``entry``, in place of ``self``.

    Unless the options say otherwise, a founder that trusts some nodes lets only these and itself
    read prompts.

    Raises:
        UserError: there are more than a mesh has nodes, so that none of them could be published.
    """
    named = options.trust if options.entry is None and is_founder else options.entry
    if named is None or named == options.entry == ():
        return options
    entry = tuple(dict.fromkeys((show(me), *(name for name in named if name != SELF))))
    if len(entry) > MAX_MEMBERS:
        option = "--trust" if named is options.trust else "--entry"
        raise UserError(
            f"`{option}` names {len(entry) - 1} nodes beside this one, more than a mesh has",
            hint=f"name at most {MAX_MEMBERS - 1}",
        )
    return replace(options, entry=entry)


def amend(charter: Charter, options: NodeOptions, profiles: Profiles, longest: int) -> Charter:
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
        changes["members"] = options.members or None
    if options.replicas is not None:
        changes["replicas"] = options.replicas
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


def serve(charter: Charter, model: Charter, asked: ModelOptions) -> Charter:
    """Return the charter of a mesh that serves a model as asked, whether new or served already.

    Raises:
        UserError: an option is out of range, a name is taken, or the mesh serves too many models.
    """
    changes = _changes(model, asked)
    if model.key == charter.key:
        first = replace(charter, **changes, version=charter.version + 1)
        _check_names(first, first)
        return first
    others = tuple(each for each in charter.models if each.key != model.key)
    if len(others) + 2 > MAX_SERVED:
        raise UserError(
            f"The mesh serves {MAX_SERVED} models, the most that it can",
            hint="stop one with `meshllm model stop NAME`",
        )
    changed = replace(model, **changes)
    _check_names(changed, charter)
    return replace(charter, models=tuple(sorted((*others, changed), key=lambda each: each.key)))


def stop(charter: Charter, name: str) -> Charter:
    """Return the charter of a mesh that no longer serves a model.

    Raises:
        ModelMissing: the mesh does not serve it.
        UserError: it is the first model of the mesh.
    """
    found = charter.find(name) if name else None
    if found is None:
        raise not_served(charter, name)
    if found.key == charter.key:
        others = (each for each in charter.models if each.shape.name == found.shape.name)
        named = " or ".join(f"`meshllm model stop {each.precise_name}`" for each in others)
        raise UserError(
            f"`{name}` is the first model of the mesh, which it always serves",
            hint=f"stop another quantisation: {named}" if named else "begin a new mesh without it",
        )
    return replace(charter, models=tuple(each for each in charter.models if each.key != found.key))


def not_served(charter: Charter, name: str) -> ModelMissing:
    """Return the error that a mesh does not serve a model."""
    listed = ", ".join(f"`{unique_name(each, charter.served)}`" for each in charter.served)
    return ModelMissing(f"The mesh does not serve `{name[:100]}`", hint=f"served: {listed}")


def _changes(model: Charter, asked: ModelOptions) -> dict[str, Any]:
    """Return the changes of the charter of a model."""
    changes: dict[str, Any] = {}
    if asked.policy is not None:
        find_policy(asked.policy)
        changes["policy"] = asked.policy
    if asked.members is not None:
        members = asked.members and _within("members", asked.members, MAX_MEMBERS)
        changes["members"] = members or None
    if asked.replicas is not None:
        changes["replicas"] = _within("replicas", asked.replicas, MAX_REPLICAS)
    if asked.context is not None:
        context = _within("tokens of context", asked.context, MAX_POSITION)
        changes["shape"] = replace(model.shape, context=context)
    if asked.aliases is not None:
        _check_aliases(asked.aliases)
        changes["aliases"] = asked.aliases
    return changes


def _within(what: str, value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise UserError(f"{value} {what} are out of range", hint=f"from 1 to {most}")
    return value


def _check_aliases(aliases: Collection[str]) -> None:
    if len(aliases) > MAX_ALIASES:
        raise UserError(f"{len(aliases)} aliases of one model", hint=f"at most {MAX_ALIASES}")
    for alias in aliases:
        if (
            not alias.isprintable()
            or "," in alias
            or not 0 < len(alias.encode()) <= MAX_ALIAS_BYTES
        ):
            raise UserError(
                f"Invalid alias `{alias[:100]}`",
                hint=f"at most {MAX_ALIAS_BYTES} printable bytes without commas",
            )


def _check_names(model: Charter, mesh: Charter) -> None:
    """Raise `UserError` if a name of a model is that of another one of the mesh.

    Quantisations of one model may share its name.
    """
    for other in mesh.served:
        if other.key == model.key:
            continue
        taken = {other.precise_name, *other.aliases}
        if other.config_digest != model.config_digest:
            taken.add(other.shape.name)
        for name in (model.shape.name, model.precise_name, *model.aliases):
            if name in taken or (name in model.aliases and name == other.shape.name):
                _refuse_name(name, other, mesh, is_alias=name in model.aliases)


def _refuse_name(name: str, other: Charter, mesh: Charter, *, is_alias: bool) -> NoReturn:
    is_first, its = other.key == mesh.key, unique_name(other, mesh.served)
    stops = "" if is_first else f"stop that one with `meshllm model stop {its}`, or "
    renames = "choose another `--alias`" if is_alias else "copy this one to a folder of its own"
    raise UserError(f"The mesh serves another model as `{name}`", hint=stops + renames)


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


def _nodes(
    texts: Iterable[str], profiles: Profiles, before: Iterable[NodeId]
) -> tuple[NodeId, ...]:
    names = resolve_names(texts, profiles)
    return tuple(sorted({*names.resolved, *(() if names.is_complete else before)}))
