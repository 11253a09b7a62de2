"""Detection of a duplicate identity: another process that uses the key of this node."""

from math import inf

from meshllm.errors import NotAuthorised
from meshllm.names import NodeId

DUPLICATE_S = 3.0  # s; a peer that keeps refusing this process for longer sees a duplicate
FRESH_S = 120.0  # s; longer than the pauses between dials of a peer that refuses


class DuplicateIdentity:
    """Detects a duplicate identity from the reasons with which peers close links.

    After a restart, each peer refuses this node as a duplicate until its link to the former process
    times out, which a suspended peer notices late. So only repeated refusals by one peer count. A
    process that was accepted once does not end by what a single peer says.
    """

    def __init__(self) -> None:
        self._since: dict[NodeId, tuple[float, float]] = {}
        """When each peer refused first, and last."""

    def dropped(
        self, peer: NodeId, *, is_duplicate: bool, now: float, heard: float
    ) -> NotAuthorised | None:
        """Note why a peer closed a link; return the error if the identity is in use elsewhere.

        A beat ``heard`` since the first refusal means that this process was accepted meanwhile.
        """
        if not is_duplicate:
            self._since.pop(peer, None)
            return None
        since, _ = self._since.get(peer, (now, now))
        self._since[peer] = (now if heard > since else since), now
        sure = [
            last > since + DUPLICATE_S and last > now - FRESH_S and heard <= since
            for since, last in self._since.values()
        ]
        if sum(sure) < (1 if heard == -inf else 2):
            return None
        return NotAuthorised(
            "Another process runs with the key of this node",
            hint="give each node its own state folder: `--state FOLDER`",
        )
