"""Invalid messages on the links of a ring: they end one request, and the others go on."""

import asyncio
import re
from pathlib import Path

import pytest

from meshllm.errors import PeerFault
from meshllm.model.files.source import resolve
from meshllm.names import SessionId
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.protocol.session.codec import MAX_POSITION, decode
from meshllm.protocol.session.messages import Data
from meshllm.request import Sampling
from tests.builders.tampering import Tampering

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8, 2, 8))
TOKENS = 12
OPTIONS = RingOptions(2, inference=InferenceConfig(threads=1, prefix_bytes=0, speculation=False))
POS, ROWS, DTYPE, DIMENSIONS, WIDTH = 26, 30, 35, 36, 45  # places in a message with rows


def number(value: int) -> bytes:
    return value.to_bytes(4, "little")


SPOILED: dict[str, tuple[int, bytes, str]] = {
    "dtype": (DTYPE, b"\x63", "Blob of unknown dtype 99"),
    "dimensions": (DIMENSIONS, b"\x05", "Blob with 5 dimensions"),
    "shape": (WIDTH, number(1), r"Blob of shape .* bytes, not"),
    "rows": (ROWS, number(4097), "4097 rows; allowed are 1 to 4096"),
    "position": (POS, number(MAX_POSITION), "pos; allowed are 0 to"),
}


class Spoiling:
    """Spoils the ``at``-th message with rows of the first session that has any."""

    def __init__(self, at: int, place: int, value: bytes) -> None:
        self._at, self._place, self._value = at, place, value
        self._session: SessionId | None = None

    def __call__(self, sent: int, message: bytes) -> bytes:
        data = decode(message)
        assert isinstance(data, Data)
        self._session = self._session or data.session
        self._at -= data.session == self._session
        if data.session != self._session or self._at != 0:
            return message
        return message[: self._place] + self._value + message[self._place + len(self._value) :]


async def ask(ring: LocalRing, prompt: tuple[int, ...]) -> list[int]:
    return [token async for token in ring.tokens(prompt, Sampling(), TOKENS)]


@pytest.mark.parametrize("at", [1, 2, 5, 6], ids=["prompt", "first row", "step", "row"])
@pytest.mark.parametrize(("place", "value", "words"), SPOILED.values(), ids=SPOILED)
async def test_an_invalid_message_ends_its_request_and_no_other(
    llama: Path, at: int, place: int, value: bytes, words: str
) -> None:
    """Odd messages of a session are for the stage, even ones for the entry."""
    transport = Tampering(Spoiling(at, place, value))
    async with open_local_ring(resolve(str(llama)), OPTIONS, transport) as ring:
        entry = ring.entry
        asked = (ask(ring, prompt) for prompt in PROMPTS)
        ended = await asyncio.gather(*asked, return_exceptions=True)
        right = [await ask(ring, prompt) for prompt in PROMPTS]

        (error,) = (each for each in ended if each not in right)
        assert isinstance(error, PeerFault)
        assert re.search(f"rank 1: .*{words}", str(error))
        assert ring.entry is entry
        assert entry.budget.live_bytes == ring.stages[0].budget.live_bytes == 0
