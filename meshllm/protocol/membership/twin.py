"""Duplicate identity: whether another process runs with the key of this node."""

from meshllm.errors import NotAuthorised
from meshllm.names import NodeId

TWIN_S = 3.0  # s for which one peer takes this process for another, after which it is one


class Twin:
    """Listens to why peers close links.

    A restarted node is taken for its former self until its peers miss that, each in its own time: a
    peer that slept does so late. So what counts is what one peer says again and again.
    """

    def __init__(self) -> None:
        self._since: dict[NodeId, float] = {}

    def dropped(
        self, peer: NodeId, *, is_twin: bool, now: float, heard: float
    ) -> NotAuthorised | None:
        """Note that a peer closed the last link because of a twin, or for another reason; judge.

        A peer that was ``heard`` since then took this process for the one with the key.
        """
        since = self._since.get(peer)
        if not is_twin:
            self._since.pop(peer, None)
        elif since is None or heard > since:
            self._since[peer] = now
        elif now > since + TWIN_S:
            return NotAuthorised(
                "Another process runs with the key of this node",
                hint="give each node a state folder of its own: `--state FOLDER`",
            )
        return None
