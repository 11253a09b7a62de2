"""The command line of a provider; whole ones run in `tests/processes/test_provide.py`."""

import subprocess
import sys

import pytest

from tests.cli.conftest import Invoke


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "`provide` needs either `--url` or a command"),
        (("--url", "http://a/v1", "--", "vllm"), "`provide` needs either `--url` or a command"),
        (("--", "no-such-engine", "serve"), "There is no command `no-such-engine`"),
        (("--url", "a"), "`a` is not an HTTP URL"),
        (("--url", "http://a/v1", "--key-env", "NONE"), "The variable `NONE` is not set"),
        (("--url", "http://a/v1"), "A provider joins a mesh"),
        (("--url", "http://a/v1", "--join", "x"), "Invalid ticket"),
        (("--url", "http://a/v1", "--join", "x", "--offer", "a="), "Invalid `--offer`: up to 32"),
        (("--url", "http://a/v1", "--join", "x", "--offer", "a" * 2000), "`aaaa"),
        (("--url", "http://a/v1", "--join", "x", "--precision", "\u20ac" * 22), "`--precision` is"),
    ],
)
def test_what_cannot_be_provided_is_refused(
    meshllm: Invoke, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NONE", raising=False)

    result = meshllm("provide", *words)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")


def test_a_provider_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "import meshllm.node.control, meshllm.node.node, meshllm.node.provider\n"
        "print(*{'numpy', 'torch', 'transformers'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []
