"""`meshllm`, the object in a request of what OpenAI's and Anthropic's fields do not have."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from math import inf

from meshllm.api.access.accounts import ApiKey
from meshllm.api.generation.generating import DRAWN_SEEDS, SEEDS
from meshllm.api.generation.service import IndexedEvent, Service, within_limits
from meshllm.api.respond import begun_within, within
from meshllm.names import bits_of
from meshllm.node.requests.needs import lacking, waits_for_ring
from meshllm.outline.eligibility import OutlineMode
from meshllm.request import Answer, Piece
from meshllm.request import Request as Asked
from meshllm.status import ModelStatus, of_providers
from meshllm.strict_json import WrongField

MAX_AFFINITY = 128  # characters

_MODES = {None: None, False: None, True: OutlineMode.ON, "auto": OutlineMode.AUTO}


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a request needs, on every route; null is the same as absent."""

    min_precision: str | None = None
    """Refuse models whose weights have fewer bits: `int4`, `int8`, `bf16`, `fp16`, `fp32`."""
    min_context: int | None = None
    """Refuse models that take fewer tokens."""
    exact: bool | None = None
    """Refuse models whose tokens are not bit-identical to those of transformers."""
    deadline_ms: int | None = None
    """Prefer what is fast enough; end the answer with an error if it is not complete by then."""
    first_token_ms: int | None = None
    """End it with an error if its first token has not come by then, such as in a long queue."""
    trust: tuple[str, ...] | None = None
    """Names or ids of the nodes that may see the request."""
    affinity: str | None = None
    """Go to the replica or provider that answers other requests with this text."""

    @property
    def min_bits(self) -> int:
        """The fewest bits of a weight; raise `WrongField` for an unknown precision."""
        if self.min_precision is None:
            return 0
        if not (bits := bits_of(self.min_precision)):
            text = f"Invalid value `{self.min_precision[:40]}` for `meshllm.min_precision`"
            raise WrongField("meshllm.min_precision", text, hint="int4, int8, bf16, fp16 or fp32")
        return bits

    def choose(self, models: Sequence[ModelStatus], asked: Sequence[Asked]) -> ModelStatus:
        """Return the first of the quantisations of a model that has what the request needs.

        Those that serve now precede others, unless only some nodes are trusted: which nodes their
        rings have is not known here. It is the first one as its providers serve it if these answer,
        in place of rings: none that serves has what is needed, and one of them has.
        """
        first, met = models[0], [each for each in models if self._is_met_by(each)]
        if any(each.trusted is not None for each in asked):
            met = met[:1]
        if serving := [each for each in met if each.rings]:
            return serving[0]
        if any(self._has(each.weight_precision, each.context) for each in models):
            able = all(self._may_substitute(first, each) for each in asked)
        else:
            sizes = ((each.precision, each.context) for each in first.beside)
            able = not self.exact and any(self._has(*each) for each in sizes)
        if first.beside and able:
            return of_providers(first.name, first.beside)
        return met[0] if met else first

    def check(self, model: ModelStatus) -> None:
        """Raise `WrongField` if a model does not have what the request needs.

        Of rings and providers of a model some may have it: they are chosen when they are asked.
        """
        bits = self.min_bits
        for name in ("deadline_ms", "first_token_ms"):
            if (limit := getattr(self, name)) is not None and limit < 1:
                raise WrongField(f"meshllm.{name}", f"`meshllm.{name}` is {limit}, not at least 1")
        if len(self.affinity or "") > MAX_AFFINITY:
            text = f"`meshllm.affinity` has more than {MAX_AFFINITY} characters"
            raise WrongField("meshllm.affinity", text)
        if not model.is_uniform:
            return
        if self.exact and not model.is_exact:
            text = f"`{model.name}` is not computed bit-identically to transformers"
            without = "without `--quant` and a lossy `--wire`"
            hint = f"start every node of its ring with `--exact`, {without}"
            raise WrongField("meshllm.exact", text, hint=hint)
        self._check_sizes(model, bits)

    def of(self, asked: Asked) -> Asked:
        """Return a request that only what meets these needs may answer."""
        return replace(
            asked,
            trusted=self.trust,
            needs_exact=bool(self.exact),
            min_bits=self.min_bits,
            min_context=self.min_context or 0,
            deadline_ms=self.deadline_ms or 0,
            affinity=self.affinity or "",
        )

    def _may_substitute(self, model: ModelStatus, asked: Asked) -> bool:
        """Return whether a provider of a model answers a request while no ring serves."""
        nodes = {each.provider for each in model.beside}
        if asked.trusted is not None and nodes.isdisjoint(asked.trusted):
            return False
        able = (not lacking(each.precision, each.context, asked) for each in model.beside)
        return not waits_for_ring(asked) and any(able)

    def _is_met_by(self, model: ModelStatus) -> bool:
        is_able = self._has(model.weight_precision, model.context)
        return is_able and (model.is_exact or not self.exact)

    def _has(self, precision: str, context: int) -> bool:
        return bits_of(precision) >= self.min_bits and context >= (self.min_context or 0)

    def _check_sizes(self, model: ModelStatus, bits: int) -> None:
        if bits > bits_of(model.weight_precision):
            has = model.weight_precision or "of unknown precision"
            text = f"`{model.name}` is {has}, and `meshllm.min_precision` is {self.min_precision}"
            raise WrongField("meshllm.min_precision", text)
        if (self.min_context or 0) > model.context:
            text = f"`{model.name}` takes {model.context or 'an unknown number of'} tokens"
            raise WrongField("meshllm.min_context", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededNeeds(Needs):
    """The object of a dialect that has no field for a seed of its own."""

    seed: int | None = None
    """Drawn unless given; the answer tells it, so that it can be had again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension(Needs):
    """The object of a chat."""

    outline: bool | str | None = None

    def outline_mode(self, model: ModelStatus, choices: int) -> OutlineMode | None:
        """Return how to outline so many answers; raise `WrongField` if it cannot be done.

        Outlines share the prefix cache of the ring: an engine's model is not outlined.
        """
        if self.outline not in _MODES:
            text = f"Invalid value `{str(self.outline)[:40]}` for `meshllm.outline`"
            raise WrongField("meshllm.outline", text, hint="true, false or `auto`")
        mode = _MODES[self.outline]
        if choices == 1 and not model.providers:
            return mode
        if mode is OutlineMode.ON:
            what = f"{choices} answers" if choices > 1 else "an answer of a provider"
            raise WrongField("meshllm.outline", f"`meshllm.outline` cannot make {what}")
        return None

    def _may_substitute(self, model: ModelStatus, asked: Asked) -> bool:
        is_outlined = self.outline is True  # which only a ring does
        return not is_outlined and Needs._may_substitute(self, model, asked)


def seed_of(needs: SeededNeeds | None) -> int:
    """Return the seed of a request, a random one unless it is given."""
    given = needs.seed if needs else None
    return secrets.randbelow(DRAWN_SEEDS) if given is None else given % SEEDS


async def model_as_needed(
    service: Service, key: ApiKey | None, name: str, asked: Sequence[Asked], needs: Needs | None
) -> ModelStatus:
    """Return a model by name, as its rings or its providers serve it, whichever answer requests.

    Raises:
        Refused: it is not served, yet or to this key.
        WrongField: the precision is unknown.
    """
    models, needs = await service.quantisations(key, name), needs or Needs()
    return needs.choose(models, [within_limits(key, needs.of(each)) for each in asked])


def answer_as_needed(
    service: Service,
    key: ApiKey | None,
    model: ModelStatus,
    asked: Sequence[Asked],
    needs: Needs | None,
    outline: OutlineMode | None = None,
) -> AsyncGenerator[IndexedEvent, None]:
    """Return the events of requests, see `Service.answer`; raise `WrongField` for an unmet need."""
    needs = needs or Needs()
    needs.check(model)
    needs, whose = _with_deadline(needs, key)

    def timed(events: AsyncGenerator[IndexedEvent, None]) -> AsyncGenerator[IndexedEvent, None]:
        if needs.first_token_ms:
            events = begun_within(events, needs.first_token_ms / 1000, _is_begun)
        return within(events, needs.deadline_ms / 1000, whose) if needs.deadline_ms else events

    return service.answer(key, model, [needs.of(each) for each in asked], outline, timed)


def _with_deadline(needs: Needs, key: ApiKey | None) -> tuple[Needs, str]:
    """Return the needs with the deadline of the key, if that is earlier, and whose it is."""
    limit_s = key.limits.deadline_s if key else None
    if key is None or limit_s is None or 1000 * limit_s >= (needs.deadline_ms or inf):
        return needs, "the request"
    return replace(needs, deadline_ms=1000 * limit_s), f"the key `{key.name}`"


def _is_begun(news: IndexedEvent) -> bool:
    return isinstance(news[1], Piece | Answer)
