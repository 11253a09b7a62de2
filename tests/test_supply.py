"""Every pinned version has the hashes of its files; `just audit` downloads and checks them."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_the_hashes_are_of_the_pinned_versions() -> None:
    pins = re.findall(r"^[\w.-]+==\S+", (HERE / "constraints.txt").read_text(), re.MULTILINE)
    hashed = re.findall(
        r"^([\w.-]+==\S+)(?: ;[^\\\n]*)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$",
        (HERE / "hashes.txt").read_text(),
        re.MULTILINE,
    )

    normal = [pin.replace("_", "-") for pin in pins]
    assert sorted(pin for pin, _ in hashed) == sorted(normal), "run `just hashes`"
    assert len(pins) > 90
