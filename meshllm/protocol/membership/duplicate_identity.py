"""Detection of a duplicate identity: another process that uses the key of this node."""

from meshllm.errors import NotAuthorised
from meshllm.names import NodeId

DUPLICATE_S = 3.0  # s; a peer that keeps refusing this process for longer sees a duplicate


class DuplicateIdentity:
    """Detects a duplicate identity from the reasons with which peers close links.

    After a restart, each peer refuses this node as a duplicate until its link to the former process
    times out, which a suspended peer notices late. So only repeated refusals by one peer count.
    """

    def __init__(self) -> None:
        self._since: dict[NodeId, float] = {}

    def dropped(
        self, peer: NodeId, *, is_duplicate: bool, now: float, heard: float
    ) -> NotAuthorised | None:
        """Note why a peer closed a link; return the error if the identity is in use elsewhere.

        A beat ``heard`` since the first refusal means that this process was accepted meanwhile.
        """
        since = self._since.get(peer)
        if not is_duplicate:
            self._since.pop(peer, None)
        elif since is None or heard > since:
            self._since[peer] = now
        elif now > since + DUPLICATE_S:
            return NotAuthorised(
                "Another process runs with the key of this node",
                hint="give each node its own state folder: `--state FOLDER`",
            )
        return None
