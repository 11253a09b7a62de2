"""The fields that chat and text completions share, and their part of a request of the mesh.

Fields that change no answer are accepted and ignored by name, others that are not supported are
rejected by name.
"""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from starlette.requests import Request

from meshllm.api.access.gate import key_of
from meshllm.api.generation.service import Service
from meshllm.api.respond import SHORT_BYTES, read_body, while_connected
from meshllm.request import Request as Asked
from meshllm.request import Sampling
from meshllm.strict_json import WrongField, build

T = TypeVar("T")

MAX_CHOICES = 16  # of one prompt; each is a session
MAX_STOPS = 4  # OpenAI API reference, as the next two
MAX_BIASES = 1024
DEFAULT_TEMPERATURE = 1.0
SEEDS = 1 << 63
DRAWN_SEEDS = (1 << 53) - MAX_CHOICES  # JavaScript reads those of all choices exactly

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prediction",
    }
)  # fmt: skip
"""Fields for the operator's records or speed: they change no answer."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "best_of": (1,),
    "verbosity": ("medium",),
}
"""Values of fields that are not supported which ask for nothing."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted, ignored: it pads chunks against observers of unencrypted lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFields:
    """Fields of a request; null is the same as absent."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def choices(self) -> int:
        """The number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def has_usage(self) -> bool:
        """Whether the last chunk of a stream has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def request(self, max_tokens: int | None) -> Asked:
        """Return the part of a request that these fields make; raise `WrongField` if invalid."""
        if not 1 <= self.choices <= MAX_CHOICES:
            raise WrongField("n", f"`n` is {self.n}, not between 1 and {MAX_CHOICES}")
        if self.stream_options is not None and not self.stream:
            raise WrongField("stream_options", "`stream_options` requires `stream`")
        return Asked(
            sampling=self._sampling(),
            max_tokens=max_tokens,
            stop=self._stops(),
            logit_bias=self._bias(),
        )

    def _stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if len(stops) > MAX_STOPS or "" in stops:
            raise WrongField("stop", f"`stop` must have 1 to {MAX_STOPS} non-empty texts")
        return stops

    def _bias(self) -> tuple[tuple[int, float], ...]:
        given = self.logit_bias or {}
        if len(given) > MAX_BIASES:
            text = f"`logit_bias` has {len(given)} tokens, more than {MAX_BIASES}"
            raise WrongField("logit_bias", text)
        for token in given:
            if not (token.isascii() and token.isdecimal() and len(token) < 10):
                raise WrongField("logit_bias", f"`{token[:40]}` in `logit_bias` is not a token id")
        return tuple((int(token), value) for token, value in given.items())

    def _sampling(self) -> Sampling:
        """Return the sampling parameters, with a random seed unless one is given."""
        given: dict[str, Any] = {
            each.name: value
            for each in fields(Sampling)
            if (value := getattr(self, each.name)) is not None
        }
        drawn = secrets.randbelow(DRAWN_SEEDS) if self.seed is None else self.seed % SEEDS
        return Sampling(**{"temperature": DEFAULT_TEMPERATURE, **given, "seed": drawn})


def variants(asked: Asked, count: int) -> list[Asked]:
    """Return requests for ``count`` answers, which differ in their seeds."""
    first = asked.sampling
    return [
        replace(
            asked,
            sampling=replace(first, seed=(first.seed + place) % SEEDS),
            shares_prefix=count > 1,
        )
        for place in range(count)
    ]


async def read_fields(
    service: Service,
    request: Request,
    kind: type[T],
    apart: Collection[str],
    harmless: Collection[str] = HARMLESS,
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL,
) -> tuple[T, dict[str, object]]:
    """Read a body into a dataclass, as `build_fields`."""

    def convert(found: object) -> tuple[T, dict[str, object]]:
        return build_fields(found, kind, apart, harmless, neutral)

    key = key_of(request)
    with service.receiving(key) as hold:
        data = await read_body(request, hold=hold)
        reading = service.read(key, data, convert)
        is_short = len(data) <= SHORT_BYTES  # does not wait
        return await (reading if is_short else while_connected(request, reading))


def build_fields(
    found: object,
    kind: type[T],
    apart: Collection[str],
    harmless: Collection[str] = HARMLESS,
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL,
) -> tuple[T, dict[str, object]]:
    """Build a dataclass, without what asks for nothing; raise `UserError` if invalid.

    The fields ``apart`` are returned as they are.
    """
    kept = dict[str, object]()
    if isinstance(found, dict):
        kept = {name: found[name] for name in apart if name in found}
        found = {
            name: value
            for name, value in found.items()
            if name not in kept and name not in harmless and value not in neutral.get(name, ())
        }
    return build(kind, found, others=apart), kept
