"""Runs the command of its arguments as a node that breaks the rules of the ring.

``python liar.py LIE PYTHON -m meshllm WORD...``; a lie is a key of `LIES`.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshllm.cli.app import main
from meshllm.cli.node import node
from meshllm.cli.shared.local import import_heavy

if TYPE_CHECKING:
    from meshllm.node.session.entry import EntryNode
    from meshllm.protocol.session.blob import SessionKey
    from meshllm.protocol.session.messages import Blob

SESSIONS = 64  # twice as many as a rank serves
POSITIONS = 38_912  # of each; the model has 2,048
ROWS = 64
PAUSE_S = 0.05  # s between two chunks of all sessions


def send(change: Callable[[Any], Any]) -> None:
    """Seal something else than the hidden states [1, T, D] that were computed."""
    from meshllm.model.wire.payload import to_payload
    from meshllm.node.session import activation_codec
    from meshllm.protocol.session.blob import seal
    from meshllm.protocol.session.messages import DType

    def lying(key: "SessionKey", hidden: Any, **_: bool) -> "Blob":
        code, shape, payload = to_payload(change(hidden))
        return seal(key, DType(code), shape, payload)

    setattr(activation_codec, "sealed", lying)  # noqa: B010 -- mypy: not exported


def send_nan() -> None:
    """Send NaN."""
    send(lambda hidden: hidden * float("nan"))


def send_wide_rows() -> None:
    """Send rows with a column too many."""
    from torch.nn.functional import pad

    send(lambda hidden: pad(hidden, (0, 1)))


def compute_wrong_values() -> None:
    """Send finite values of the right shape, as from other weights than those of the digests."""
    send(lambda hidden: hidden.flip(-1))


def exceed_the_context() -> None:
    """As the entry, send rows for many sessions, at positions that the model does not have."""
    from meshllm.node.session.entry import EntryNode

    run = EntryNode.run

    async def flooding(entry: EntryNode) -> Any:
        flood = asyncio.ensure_future(_flood(entry))
        try:
            return await run(entry)
        finally:
            flood.cancel()

    setattr(EntryNode, "run", flooding)  # noqa: B010 -- mypy: a method


async def _flood(entry: "EntryNode") -> None:
    import torch

    from meshllm.names import SESSION_ID_BYTES, SessionId
    from meshllm.node.session.wire import sealed
    from meshllm.protocol.session.blob import session_key
    from meshllm.protocol.session.messages import Data, Flags, Forward

    assert entry._neighbours is not None
    form = entry.layers.row_format
    rows = torch.zeros(1, ROWS, form.width, dtype=form.dtype)
    sessions = [SessionId(os.urandom(SESSION_ID_BYTES)) for _ in range(SESSIONS)]
    blobs = [sealed(session_key(session), rows) for session in sessions]
    for pos in range(0, POSITIONS, ROWS):
        for session, blob in zip(sessions, blobs, strict=True):
            epoch = entry._config.epoch
            data = Data(session, epoch, 0, pos, ROWS, Flags.PREFILL, blob)
            entry._neighbours.forward(Forward(data))
        await asyncio.sleep(PAUSE_S)


LIES = {
    "nan": send_nan,
    "wide": send_wide_rows,
    "wrong": compute_wrong_values,
    "beyond": exceed_the_context,
}

if __name__ == "__main__":
    lie = LIES[sys.argv[1]]

    def become_a_liar(*modules: str, folder: Path | None = None) -> None:
        """Import what a node needs; then lie."""
        import_heavy(*modules, folder=folder)
        lie()

    setattr(node, "import_heavy", become_a_liar)  # noqa: B010 -- mypy: not exported
    sys.argv = ["meshllm", *sys.argv[5:]]
    main()
