"""Report of the calls that a client makes, for scripts in environments of their own."""

import json
from collections.abc import Callable


def run(*calls: Callable[[], None]) -> None:
    """Make the calls; print a line of JSON for each, with what was wrong."""
    for call in calls:
        try:
            call()
            problem = ""
        except Exception as error:  # each call is reported
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps({"call": call.__name__, "problem": problem}), flush=True)
