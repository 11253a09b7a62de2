from dataclasses import dataclass

from meshllm.cli.shared.options import docs
from tests.cli.conftest import Invoke


@dataclass
class Example:
    """A class with one documented field of two."""

    first: int = 1
    """What the first
    is for."""
    second: int = 2


def test_the_docstring_of_a_field_is_its_help_text() -> None:
    assert docs(Example) == {"first": "What the first\nis for."}


def test_help_shows_text_default_and_variable(meshllm: Invoke) -> None:
    text = " ".join(meshllm("chat", "--help").stdout.split())

    shown = "Keep the most likely tokens up to a total probability of X."
    assert f"--top-p X {shown} [default: the model's; env: MESHLLM_TOP_P]" in text
    assert "gives the same text. [default: random; env: MESHLLM_SEED]" in text
    assert "[default: no limit; env: MESHLLM_MAX_TOKENS]" in text
    assert "--state FOLDER Folder of" in text
    assert "--ends entry|client Which side holds the embedding and the LM head." in text
