"""Report of the calls that a client makes, for scripts in environments of their own."""

import json
from collections.abc import Callable


def run(*calls: Callable[[], str | None]) -> None:
    """Make the calls; print a line of JSON for each, with what was wrong, or what it returned."""
    for call in calls:
        problem, found = "", None
        try:
            found = call()
        except Exception as error:  # each call is reported
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps({"call": call.__name__, "problem": problem, "found": found}), flush=True)
