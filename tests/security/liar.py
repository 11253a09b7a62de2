"""Runs the command of its arguments as a node that sends NaN for every hidden state.

``python liar.py PYTHON -m meshllm WORD...``
"""

import sys
from typing import Any

from meshllm.cli.app import main
from meshllm.cli.node import node
from meshllm.cli.shared.local import import_heavy


def become_a_liar(*modules: str) -> None:
    """Import what a node needs; then let it seal NaN in the shape of each hidden state."""
    import_heavy(*modules)

    from meshllm.model.wire.payload import to_payload
    from meshllm.node.session import activation_codec
    from meshllm.protocol.session.blob import SessionKey, seal
    from meshllm.protocol.session.messages import Blob, DType

    def lying(key: SessionKey, hidden: Any, **_: bool) -> Blob:
        code, shape, payload = to_payload(hidden * float("nan"))
        return seal(key, DType(code), shape, payload)

    setattr(activation_codec, "sealed", lying)  # noqa: B010 -- mypy: not exported


if __name__ == "__main__":
    setattr(node, "import_heavy", become_a_liar)  # noqa: B010 -- likewise
    sys.argv = ["meshllm", *sys.argv[4:]]
    main()
