"""Duplicate identity: whether another process runs with the key of this node."""

from meshllm.errors import NotAuthorised

TWIN_S = 3.0  # s of being taken for another process, after which it is one


class Twin:
    """Listens to why links are closed; a restarted node is taken for its former self at first."""

    def __init__(self) -> None:
        self._since: float | None = None

    def dropped(self, *, is_twin: bool, now: float) -> NotAuthorised | None:
        """Note that the last link was closed because of a twin, or another why; judge."""
        if not is_twin:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now > self._since + TWIN_S:
            return NotAuthorised(
                "Another process runs with the key of this node",
                hint="give each node a state folder of its own: `--state FOLDER`",
            )
        return None
