"""The models of a mesh as JSON, for clients: `Models` of `meshllm.status`, bounded."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshllm.errors import PeerFault, UserError
from meshllm.json_shape import check_shape
from meshllm.protocol.membership.codec import MAX_MODEL_LIST_BYTES
from meshllm.status import Models, ModelStatus, from_json, to_json
from meshllm.strict_json import parse

MAX_VALUES = 16_384  # a model has some 30, and seven for each provider
MAX_NUMBER_BYTES = 64 << 10

_DROPPED: tuple[dict[str, Any], ...] = {}, {"offers": ()}, {"beside": ()}
"""What is left out of a list that is too long, one after the other: first what details
`providers`, then those beside rings, without which clients are told that there are only rings."""


def models_to_json(models: Sequence[ModelStatus]) -> bytes:
    """Encode models; what does not fit is left out: offers first, which any member can make long.

    Of models that are too many even so, the first ones are listed.
    """
    for dropped in _DROPPED:
        models = tuple(replace(each, **dropped) for each in models)
        if len(_write(models)) <= MAX_MODEL_LIST_BYTES:
            return _write(models)
    left, listed = MAX_MODEL_LIST_BYTES - len(_write(())), list[ModelStatus]()
    for each in models:
        left -= len(_write((each,))) - len(_write(())) + 1
        if left < 0:
            break
        listed.append(each)
    return _write(listed)


def models_from_json(data: bytes) -> tuple[ModelStatus, ...]:
    """Decode models.

    Raises:
        PeerFault: malformed, or too many values.
    """
    try:
        check_shape(data, values=MAX_VALUES, number_bytes=MAX_NUMBER_BYTES)
        return from_json(Models, parse(data)).models
    except UserError as error:
        raise PeerFault(f"Malformed list of models: {error}") from None


def _write(models: Sequence[ModelStatus]) -> bytes:
    fields = to_json(Models(tuple(models)))
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
