"""The charter, the mesh-wide configuration: its encoding, amendments and their merge.

Theory of operation
-------------------
The founder fixes the model once. The *terms* can change later: every node publishes the terms that
it changed, each with a version, and of all values of one term the highest (version, author) is in
force; of equal versions, the founder's is the highest. Terms of removed authors count for nothing,
and of `FOUNDER_TERMS` only the founder's do: who may read prompts is not for every member to say. A
member's `YIELDING` terms hold while the model has a ring with them, see `Charter.eased`, and its
context is at most the founder's: else one member could leave a mesh without any ring. Concurrent
changes of different terms are therefore all kept, and every node with the same records derives the
same charter, in whatever order they arrived.

Every node ignores a version that exceeds the next lower one by more than `MAX_STEP`, so that no
member can publish a version that cannot be exceeded, unless it is the founder's.

A term `model.<key>` is a further model that the mesh serves, with the terms of its own; an empty
one stops it. The terms about nodes (exclude, prefer, entries, ends) and the sessions hold for all.

Names are sent as text. An unknown term, name or record version comes from a later version of
meshllm. It turns this node into a standby (`Charter.obstacle`) while the others go on: a node that
ignored part of the charter would disagree with the others about the ring. It counts only if the
founder says it, else any member could stop all rings: so a version that adds a term or a name must
believe it of the founder only, as all earlier ones do.
"""

from base64 import b85decode, b85encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from struct import Struct
from typing import Any, Self

from blake3 import blake3

from meshllm.errors import PeerFault
from meshllm.names import (
    DIGEST_BYTES,
    MODEL_KEY_BYTES,
    NODE_ID_BYTES,
    Digest,
    ModelKey,
    NodeId,
    Quant,
    bits_of,
    short,
)
from meshllm.protocol.binary import RECORD_VERSION, Reader, open_record, sized, start_record
from meshllm.protocol.membership.records import MAX_BYTES, MAX_LAYERS, MAX_MEMBERS
from meshllm.protocol.planning.plan import MAX_NAME_BYTES, Ends, ModelSizes
from meshllm.protocol.planning.policies import AUTO, POLICIES
from meshllm.protocol.session.codec import MAX_POSITION
from meshllm.protocol.session.messages import DType

MAX_WIDTH = 1 << 20  # of a hidden state; the largest published is 18432
MAX_SESSIONS = 4096
MAX_VERSION = 1 << 32  # of the founder's charter, without terms
MAX_STEP = 1 << 32  # between versions of one term; at one change a second, over a century
MAX_TERM_VERSION = 1 << 64  # the field has 64 bits
MAX_TERMS = 32  # of one author
MAX_WORD_BYTES = 64  # name of a term, a dtype or a quantisation
MAX_TERM_BYTES = 8 * 1024  # value of a term; 64 node ids take 4.1 KiB
MAX_SERVED = 12  # models of a mesh; all terms of one author fit into one item
MAX_MODEL_BYTES = 1536  # term of a further model; most take 300 bytes
MAX_REPLICAS = 16  # of one model
MAX_ALIASES = 4  # of one model
MAX_ALIAS_BYTES = 64
MAX_KINDS = 64  # of layers of one model
MIN_PREFIX = 6  # hexadecimal digits of a key that identify a model

FOUNDER_TERMS = frozenset({"ends", "entries", "sessions"})  # options set the second of these only
YIELDING = "exclude", "members"

_HEAD = Struct(f"<Q BH IIB QQ {DIGEST_BYTES}s")
"""Version; tied, layers; hidden size, context, item size; embedding, head; configuration."""
_LAYER = Struct("<QQ")
_WORKSPACE = Struct("<Q")  # bytes, at the end of a record; not in those of earlier versions
_MODEL = Struct(f"<BHB IIB QQ {DIGEST_BYTES}s BBB")
"""Tied, layers, kinds of layers; as in `_HEAD`; members, replicas, aliases."""
_MODEL_TERM = "model."  # before the key in hexadecimal digits
_AMENDMENTS = Struct("<QB")  # version, terms
_VERSION = Struct("<Q")
_DTYPES = {each.name.lower(): each for each in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)}
_QUANTS = {str(each): each for each in Quant}
_ENDS = {str(each): each for each in Ends}


@dataclass(frozen=True, slots=True)
class OverridableTerm:
    """A term in force that a member set; the founder's value counts if no ring satisfies it."""

    name: str
    author: NodeId
    founders: Any
    """The value that the founder wants."""


@dataclass(frozen=True, slots=True)
class Charter:
    """The mesh-wide configuration."""

    version: int
    shape: ModelSizes
    """The model, and the context length to reserve memory for."""
    dtype: DType
    """Of the model's computation and of the hidden states on the wire."""
    config_digest: Digest
    """blake3 of the model's configuration."""
    policy: str = AUTO
    members: int | None = None
    """Number of nodes in the ring; None lets the policy choose."""
    sessions: int = 1
    """Sessions of full context to reserve memory for."""
    ends: Ends = Ends.ENTRY
    exclude: tuple[NodeId, ...] = ()
    """Nodes that hold no layers."""
    prefer: tuple[NodeId, ...] = ()
    """Nodes that hold layers if one fits."""
    entries: tuple[NodeId, ...] = ()
    """Nodes that may be the entry, which reads prompts; empty for all. Only the founder sets it."""
    quant: Quant = Quant.NONE
    """Weight quantisation, the same on every node, so that the text does not depend on the plan."""
    unknown: tuple[str, ...] = ()
    """Parts that this version does not know, as phrases; their fields hold a default."""
    replicas: int = 1
    """Rings of the model, if there are nodes for them."""
    aliases: tuple[str, ...] = ()
    """Other names of the model in requests."""
    models: tuple["Charter", ...] = ()
    """The further models that the mesh serves, in order of their keys, without further ones."""
    yields: tuple[OverridableTerm, ...] = ()
    """Those of the `YIELDING` terms whose value is not the founder's."""

    @property
    def eased(self) -> "Charter":
        """Return the charter to plan a model's first ring with if none satisfies this one.

        It is without `yields`. Further replicas satisfy all terms, or are not made.
        """
        models = tuple(each.eased for each in self.models)
        wanted = {each.name: each.founders for each in self.yields}
        return replace(self, **wanted, models=models, yields=())

    @property
    def precision(self) -> str:
        """Return the precision of the weights: the quantisation, or the data type."""
        return self.dtype.name.lower() if self.quant is Quant.NONE else str(self.quant)

    @property
    def precise_name(self) -> str:
        """Return the name that tells the model from those of its name with other quantisations."""
        return f"{self.shape.name}@{self.precision}"

    def may_read(self, node: NodeId) -> bool:
        """Return whether a node that provides the model as a whole may read its prompts."""
        return self.ends is not Ends.CLIENT and (not self.entries or node in self.entries)

    @property
    def key(self) -> ModelKey:
        """Return what identifies the model in this mesh."""
        parts = self.shape.name.encode(), self.config_digest, str(self.quant).encode()
        return ModelKey(blake3(b"\0".join(parts)).digest(MODEL_KEY_BYTES))

    @property
    def served(self) -> tuple["Charter", ...]:
        """Return the charter of each model that the mesh serves, the founder's first."""
        return replace(self, models=()) if self.models else self, *self.models

    def find(self, model: str, quant: Quant | None = None) -> "Charter | None":
        """Return the charter of a model by name, alias or a prefix of its key; empty is the first.

        Of several matches, a name precedes an alias, and an alias a prefix. Of the quantisations
        of a name, only one with ``quant`` counts if it is given, else the first that is `ranked`.
        """
        if not model:
            return self.served[0]
        tests: tuple[Callable[[Charter], bool], ...] = (
            lambda each: each.shape.name == model,
            lambda each: each.precise_name == model,
            lambda each: model in each.aliases,
            lambda each: len(model) >= MIN_PREFIX and each.key.hex().startswith(model),
        )
        able = [each for each in ranked(self.served) if quant in {None, each.quant}]
        return next((each for matches in tests for each in able if matches(each)), None)

    @property
    def obstacle(self) -> str:
        """Return why this node is a standby; empty if it knows every part of the charter."""
        if not self.unknown:
            return ""
        return f"{self.unknown[0]}, unknown to this version; update meshllm"

    def encode(self) -> bytes:
        """Encode the record, without the terms."""
        shape = self.shape
        sizes = shape.hidden_size, shape.context, shape.itemsize
        ends = shape.embed_bytes, shape.head_bytes
        layers = zip(shape.layer_bytes, shape.kv_bytes_per_token, strict=True)
        texts = shape.name, self.dtype.name.lower(), str(self.quant)
        return b"".join(
            (
                start_record(),
                _HEAD.pack(
                    self.version, shape.tied, shape.layers, *sizes, *ends, self.config_digest
                ),
                *(_LAYER.pack(*layer) for layer in layers),
                *(sized(text.encode()) for text in texts),
                _WORKSPACE.pack(shape.workspace_bytes),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode the record; raise `PeerFault` if it is malformed."""
        reader = open_record(data, "Charter")
        version, tied, layers, *sizes, config = reader.unpack(_HEAD)
        reader.bounded("layers", layers, 1, MAX_LAYERS)
        each = [reader.unpack(_LAYER) for _ in range(layers)]
        shape = _shape(reader, each, bool(reader.bounded("for a flag", tied, 0, 1)), sizes)
        dtype, quant = reader.text(MAX_WORD_BYTES), reader.text(MAX_WORD_BYTES)
        unknown = {
            f"charter version {reader.version}": reader.version > RECORD_VERSION,
            f"dtype `{dtype}`": dtype not in _DTYPES,
            f"quantisation `{quant}`": quant not in _QUANTS,
        }
        return cls(
            reader.bounded("as version", version, 0, MAX_VERSION),
            replace(shape, workspace_bytes=_workspace(reader)),
            _DTYPES.get(dtype, DType.FLOAT32),
            Digest(config),
            quant=_QUANTS.get(quant, Quant.NONE),
            unknown=tuple(f"the mesh uses {what}" for what, is_so in unknown.items() if is_so),
        )


def ranked(served: Sequence[Charter]) -> list[Charter]:
    """Return models in the order in which one name finds them: the first, then by precision."""
    return [*served[:1], *sorted(served[1:], key=lambda each: -bits_of(each.precision))]


def unique_name(model: Charter, served: Sequence[Charter]) -> str:
    """Return the name of a model, or its precise name if the name finds another one of those."""
    found = (each for each in ranked(served) if each.shape.name == model.shape.name)
    return model.shape.name if next(found, model).key == model.key else model.precise_name


@dataclass(frozen=True, slots=True)
class Term:
    """The value of one term, set by one author."""

    name: str
    version: int
    text: str


@dataclass(frozen=True, slots=True)
class Amendments:
    """The terms that one node changed."""

    terms: tuple[Term, ...]
    """Sorted by name, each name once."""
    version: int = 1
    """Counts the records of this author."""

    @property
    def newest(self) -> int:
        """Return the highest version of its terms."""
        return max((term.version for term in self.terms), default=0)

    def encode(self) -> bytes:
        """Encode the record."""
        texts = (
            sized(term.name.encode()) + _VERSION.pack(term.version) + sized(term.text.encode())
            for term in self.terms
        )
        head = _AMENDMENTS.pack(self.version, len(self.terms))
        return start_record() + head + b"".join(texts)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode the record; raise `PeerFault` if it is malformed."""
        reader = open_record(data, "Amendments")
        version, count = reader.unpack(_AMENDMENTS)
        reader.bounded("terms", count, 0, MAX_TERMS)
        terms = tuple(_term(reader) for _ in range(count))
        names = [term.name for term in terms]
        if names != sorted(set(names)):
            raise PeerFault("Amendments with duplicate or unsorted terms")
        return cls(terms, version)


def merge(
    base: Charter, amendments: Mapping[NodeId, Amendments], founder: NodeId | None = None
) -> Charter:
    """Apply the terms in force to the founder's charter."""
    changes: dict[str, Any] = {}
    shape, terms = base.shape, in_force(amendments, founder)
    models: dict[ModelKey, Charter | str] = {each.key: each for each in base.models}
    unknown, said = list(base.unknown), amendments.get(founder) if founder else None
    for name, (author, term) in sorted(terms.items()):
        if (why := _unknown(term)) is not None:
            unknown.append(f"node `{short(author)}` set {why}")
        elif (key := _key_in(name)) is not None:
            models[key] = term.text
        elif name == "context":
            most = MAX_POSITION if founder in {None, author} else _founders("context", base, said)
            shape = replace(shape, context=min(int(term.text), most))
        else:
            changes[name] = _TERMS[name](term.text)
    merged = replace(base, **changes, shape=shape, unknown=tuple(unknown))
    merged = replace(merged, yields=tuple(_yields(merged, base, terms, said)) if founder else ())
    return replace(merged, models=_with_terms(merged, models))


def _yields(
    merged: Charter,
    base: Charter,
    terms: Mapping[str, tuple[NodeId, Term]],
    said: Amendments | None,
) -> Iterator[OverridableTerm]:
    """Yield the terms of members that yield, with the values of the founder."""
    for name, (author, _) in terms.items():
        if name not in YIELDING:
            continue
        wanted = _founders(name, base, said)
        if wanted != getattr(merged, name):
            yield OverridableTerm(name, author, wanted)


def _founders(name: str, base: Charter, said: Amendments | None) -> Any:
    """Return the value of a term that the founder wants, whether it is in force or not."""
    texts = {term.name: term.text for term in (said or Amendments(())).terms}
    if name in texts:
        return _TERMS[name](texts[name])
    return base.shape.context if name == "context" else getattr(base, name)


def _with_terms(charter: Charter, models: Mapping[ModelKey, Charter | str]) -> tuple[Charter, ...]:
    """Return the further models in order, with the terms of the mesh that hold for all.

    No more texts are read than models are served: members can describe thousands.
    """
    terms = {name: getattr(charter, name) for name in _TERMS_OF_ALL}
    terms["unknown"] = charter.unknown
    terms["yields"] = tuple(each for each in charter.yields if each.name in _TERMS_OF_ALL)
    described = (models[key] for key in sorted(models) if key != charter.key)
    read = (_read_model(each) if isinstance(each, str) else each for each in described)
    others = (replace(each, **terms) for each in read if each is not None)
    return tuple(islice(others, MAX_SERVED - 1))


def in_force(
    amendments: Mapping[NodeId, Amendments], founder: NodeId | None = None
) -> dict[str, tuple[NodeId, Term]]:
    """Return the term in force for each name, and its author.

    A version far above the others does not count, so that no member uses them up. That of the
    founder counts: it may follow a version of a member that was removed since.
    """
    pairs = ((author, term) for author, at in amendments.items() for term in at.terms)
    found: dict[str, tuple[NodeId, Term]] = {}
    for author, term in sorted(
        pairs, key=lambda pair: (pair[1].version, pair[0] == founder, pair[0])
    ):
        is_founders = term.name in FOUNDER_TERMS or _unknown(term) is not None
        if is_founders and author != founder:
            continue
        below = found[term.name][1].version if term.name in found else 0
        if term.version <= below + MAX_STEP or author == founder:
            found[term.name] = author, term
    return found


def amend(
    wanted: Charter,
    current: Charter,
    me: NodeId,
    amendments: Mapping[NodeId, Amendments],
    founder: NodeId | None = None,
) -> Amendments | None:
    """Return this node's amendments that turn ``current`` into ``wanted``; None if equal.

    A term that other nodes would refuse, for example too many nodes, is left out: see `differing`.
    """
    own = amendments.get(me, Amendments((), version=0))
    said = in_force(amendments, founder)
    versions = {name: term.version for name, (_, term) in said.items()}
    after = _texts(wanted)
    changed = {
        name: Term(name, 1 + versions.get(name, 0), after.get(name, ""))
        for name in differing(wanted, current)
    }
    changed = {name: term for name, term in changed.items() if _can_be_said(term)}
    terms = {term.name: term for term in own.terms} | changed
    # An empty term of a model, which stops it, is needed only as long as another author serves it.
    others = {term.name for node, at in amendments.items() if node != me for term in at.terms}
    kept = [each for name, each in sorted(terms.items()) if each.text or name in {*others, *_TERMS}]
    if len(kept) > MAX_TERMS:  # without models of this node that others have stopped
        theirs = {name for name, (node, _) in said.items() if node != me} - {*changed, *_TERMS}
        kept = [each for each in kept if each.name not in theirs]
    if not changed or len(kept) > MAX_TERMS:
        return None
    return Amendments(tuple(kept), own.version + 1)


def differing(wanted: Charter, found: Charter) -> list[str]:
    """Return the names of the terms that have other values than wanted."""
    before, after = _texts(found), _texts(wanted)
    return [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]


def effective_terms(
    author: NodeId, amendments: Mapping[NodeId, Amendments], founder: NodeId | None = None
) -> Amendments:
    """Return those terms of an author that are in force."""
    found = sorted(in_force(amendments, founder).items())
    return Amendments(tuple(term for _, (node, term) in found if node == author))


def overruled(
    amendments: Mapping[NodeId, Amendments], founder: NodeId | None = None
) -> Collection[NodeId]:
    """Return the authors none of whose terms is in force."""
    return amendments.keys() - {author for author, _ in in_force(amendments, founder).values()}


def _term(reader: Reader) -> Term:
    name = reader.text(MAX_WORD_BYTES)
    (version,) = reader.unpack(_VERSION)
    term = Term(name, version, reader.text(MAX_TERM_BYTES))
    if parse := _parser(name):
        try:
            parse(term.text)
        except ValueError as error:
            raise PeerFault(f"Amendments with an invalid `{name}`: {error}") from None
    return term


def _can_be_said(term: Term) -> bool:
    """Return whether other nodes would accept a term of this node."""
    parse = _parser(term.name)
    assert parse is not None  # this version writes no others
    try:
        parse(term.text)
    except ValueError:
        return False
    return term.version < MAX_TERM_VERSION and len(term.text.encode()) <= MAX_TERM_BYTES


@lru_cache(maxsize=8192)  # twice those of all authors, as all are read at each change
def _unknown(term: Term) -> str | None:
    """Return what this version does not know of a term; None if it knows all."""
    if _parser(term.name) is None:
        return f"term `{term.name}`"
    if _key_in(term.name) is not None:
        model = _read_model(term.text)
        return model.unknown[0] if model and model.unknown else None
    names: dict[str, Collection[str]] = {"policy": POLICIES, "ends": _ENDS}
    known = names.get(term.name)
    return None if known is None or term.text in known else f"{term.name} `{term.text}`"


def _texts(charter: Charter) -> dict[str, str]:
    """Return the value of every term of a charter as text."""
    return {
        **{f"{_MODEL_TERM}{each.key.hex()}": _write_model(each) for each in charter.models},
        "aliases": ",".join(charter.aliases),
        "context": str(charter.shape.context),
        "ends": str(charter.ends),
        "entries": b"".join(charter.entries).hex(),
        "exclude": b"".join(charter.exclude).hex(),
        "members": str(charter.members or 0),
        "policy": charter.policy,
        "prefer": b"".join(charter.prefer).hex(),
        "replicas": str(charter.replicas),
        "sessions": str(charter.sessions),
    }


def _number(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise ValueError("not a number")
        if not low <= int(text) <= high:
            raise ValueError(f"{text} is not between {low} and {high}")
        return int(text)

    return read


def _nodes(text: str) -> tuple[NodeId, ...]:
    data = bytes.fromhex(text)
    if len(data) % NODE_ID_BYTES or len(data) > MAX_MEMBERS * NODE_ID_BYTES:
        raise ValueError(f"{len(data)} bytes are not a list of node ids")
    return tuple(NodeId(data[at : at + NODE_ID_BYTES]) for at in range(0, len(data), NODE_ID_BYTES))


def _aliases(text: str) -> tuple[str, ...]:
    found = tuple(text.split(",")) if text else ()
    if len(found) > MAX_ALIASES or any(
        not 0 < len(each.encode()) <= MAX_ALIAS_BYTES for each in found
    ):
        raise ValueError(f"more than {MAX_ALIASES} aliases, or one of over {MAX_ALIAS_BYTES} bytes")
    return found


_TERMS: Mapping[str, Callable[[str], object]] = {
    "aliases": _aliases,
    "context": _number(1, MAX_POSITION),
    "ends": lambda text: _ENDS.get(text, Ends.ENTRY),
    "entries": _nodes,
    "exclude": _nodes,
    "members": lambda text: _number(0, MAX_MEMBERS)(text) or None,
    "policy": str,
    "prefer": _nodes,
    "replicas": _number(1, MAX_REPLICAS),
    "sessions": _number(1, MAX_SESSIONS),
}
"""Parser of each term; `ValueError` means a value that is invalid in every version."""

_TERMS_OF_ALL = "ends", "entries", "exclude", "prefer", "sessions"
"""Those that hold for all models."""


def _parser(name: str) -> Callable[[str], object] | None:
    """Return the parser of a term; None if it is unknown."""
    key = _key_in(name)
    return _TERMS.get(name) if key is None else lambda text: _check_model(key, text)


def _key_in(name: str) -> ModelKey | None:
    """Return the key of the model that a term is about; None if it is about none."""
    digits = name.removeprefix(_MODEL_TERM)
    is_key = len(digits) == 2 * MODEL_KEY_BYTES and set(digits) <= set("0123456789abcdef")
    return ModelKey(bytes.fromhex(digits)) if is_key and name != digits else None


def _check_model(key: ModelKey, text: str) -> None:
    model = _read_model(text)
    if model is not None and not model.unknown and model.key != key:
        raise ValueError(f"it is about the model `{model.key.hex()}`")


def _write_model(charter: Charter) -> str:
    """Return the value of the term of a further model; its layers are of few kinds."""
    shape = charter.shape
    layers = [*zip(shape.layer_bytes, shape.kv_bytes_per_token, strict=True)]
    kinds = list(dict.fromkeys(layers))
    sizes = shape.hidden_size, shape.context, shape.itemsize, shape.embed_bytes, shape.head_bytes
    counts = charter.members or 0, charter.replicas, len(charter.aliases)
    head = shape.tied, len(layers), min(len(kinds), MAX_KINDS), *sizes, charter.config_digest
    texts = shape.name, charter.dtype.name.lower(), charter.quant, charter.policy, *charter.aliases
    return b85encode(
        b"".join(
            (
                start_record(),
                _MODEL.pack(*head, *counts),
                *(_LAYER.pack(*kind) for kind in kinds),
                bytes(min(kinds.index(layer), MAX_KINDS) for layer in layers),
                *(sized(str(text).encode()) for text in texts),
                _WORKSPACE.pack(shape.workspace_bytes),
            )
        )
    ).decode()


def _read_model(text: str) -> Charter | None:
    """Read the term of a further model; None if it is empty. Raise `ValueError` if invalid."""
    if not text:
        return None
    if len(text) > MAX_MODEL_BYTES:
        raise ValueError(f"{len(text)} bytes are too many for a model")
    try:
        return _model(open_record(b85decode(text), "Model"))
    except PeerFault as error:
        raise ValueError(str(error)) from None


def _model(reader: Reader) -> Charter:
    tied, layers, count, *sizes, config, members, replicas, named = reader.unpack(_MODEL)
    reader.bounded("layers", layers, 1, MAX_LAYERS)
    kinds = [reader.unpack(_LAYER) for _ in range(reader.bounded("kinds", count, 1, MAX_KINDS))]
    numbers = reader.take(layers)
    reader.bounded("as kind of a layer", max(numbers), 0, count - 1)
    each = [kinds[number] for number in numbers]
    shape = _shape(reader, each, bool(reader.bounded("for a flag", tied, 0, 1)), sizes)
    dtype, quant, policy = (reader.text(MAX_WORD_BYTES) for _ in range(3))
    reader.bounded("aliases", named, 0, MAX_ALIASES)
    unknown = {
        f"dtype `{dtype}`": dtype not in _DTYPES,
        f"quantisation `{quant}`": quant not in _QUANTS,
        f"policy `{policy}`": policy not in POLICIES,
    }
    aliases = tuple(reader.text(MAX_ALIAS_BYTES) for _ in range(named))
    return Charter(
        1,
        replace(shape, workspace_bytes=_workspace(reader)),
        _DTYPES.get(dtype, DType.FLOAT32),
        Digest(config),
        policy,
        reader.bounded("members", members, 0, MAX_MEMBERS) or None,
        quant=_QUANTS.get(quant, Quant.NONE),
        unknown=tuple(f"a model with {what}" for what, is_so in unknown.items() if is_so),
        replicas=reader.bounded("replicas", replicas, 1, MAX_REPLICAS),
        aliases=aliases,
    )


def _workspace(reader: Reader) -> int:
    (size,) = reader.unpack(_WORKSPACE) if reader.left else (0,)
    return int(reader.bounded("bytes of workspace", size, 0, MAX_BYTES))


def _shape(reader: Reader, each: list[tuple[int, ...]], tied: bool, sizes: list[int]) -> ModelSizes:
    hidden_size, context, itemsize, embed_bytes, head_bytes = sizes
    for weights, cache in each:
        reader.bounded("bytes of a layer", weights, 1, MAX_BYTES)
        reader.bounded("bytes of cache per token", cache, 0, MAX_BYTES)
    return ModelSizes(
        reader.text(MAX_NAME_BYTES),
        tuple(weights for weights, _ in each),
        tuple(cache for _, cache in each),
        reader.bounded("bytes of the embedding", embed_bytes, 0, MAX_BYTES),
        reader.bounded("bytes of the head", head_bytes, 0, MAX_BYTES),
        tied,
        reader.bounded("as hidden size", hidden_size, 1, MAX_WIDTH),
        reader.bounded("bytes per element", itemsize, 1, 8),
        reader.bounded("tokens of context", context, 1, MAX_POSITION),
    )
