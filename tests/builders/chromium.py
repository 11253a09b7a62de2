"""The browser of this machine, for tests of the page."""

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)
