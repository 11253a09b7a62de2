"""The command with a real ring and the builtin model, without fakes."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from meshllm.cli.app import app
from meshllm.model.files.source import resolve


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state folder for the module."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def _remembering(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(state))


def _meshllm(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(words), input=stdin, prog_name="meshllm")


def test_piped_text_is_answered_by_a_ring_of_three_as_json() -> None:
    result = _meshllm("chat", "--nodes", "3", "--json", stdin="What is a span?\n")

    answer = json.loads(result.stdout)
    assert result.stderr == ""
    assert answer.keys() == {
        "schema", "model", "text", "reasoning", "tokens", "completion_tokens", "prompt_tokens",
        "cached_tokens",
        "finish_reason", "ttft_ms", "ms_per_token", "tokens_per_second", "tokens_per_step", "hops",
        "seed",
    }  # fmt: skip
    assert answer["text"]
    assert len(answer["tokens"]) > 1
    assert [hop["layers"] for hop in answer["hops"]][-1].endswith(":8")
    assert len(answer["hops"]) == 3


def test_the_same_seed_gives_the_same_text_on_any_ring() -> None:
    words = ("--seed", "7", "--temperature", "0.9", "--max-tokens", "24", "Tell me a story")

    one, three = (_meshllm("chat", "--nodes", nodes, *words) for nodes in ("1", "3"))
    drafted = _meshllm("chat", "--draft", "builtin", *words)

    assert (one.exit_code, three.exit_code, drafted.exit_code) == (0, 0, 0)
    assert one.stdout == three.stdout == drafted.stdout != "\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--model", "no/such"), 4, "There is no model `no/such`"),
        (("--draft", "no/such"), 4, "There is no model `no/such`"),
        (("--nodes", "9"), 2, "9 nodes for the 8 layers of `builtin`"),
        (("--nodes", "2", "--transport", "lopback"), 1, "Unknown transport `lopback`"),
    ],
)
def test_a_ring_that_cannot_form_is_reported(
    words: tuple[str, ...], code: int, message: str
) -> None:
    result = _meshllm("chat", *words, "hi")

    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(f"error: {message}")


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    result = _meshllm("chat", stdin="word " * 3000)

    assert (result.exit_code, result.stdout) == (2, "")
    assert "maximum context length is 2048 tokens" in result.stderr


def test_a_folder_without_weights_and_a_cut_file_are_named(tmp_path: Path) -> None:
    weights = resolve("builtin").folder
    empty, cut = tmp_path / "empty", tmp_path / "cut"
    empty.mkdir()
    shutil.copytree(weights, cut)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1_000_000])

    nothing = _meshllm("chat", "--model", str(empty), "hi")
    damaged = _meshllm("chat", "--model", str(cut), "hi")

    assert (nothing.exit_code, damaged.exit_code) == (4, 4)
    assert nothing.stderr.startswith(f"error: `{empty}` has no `config.json`\n")
    assert damaged.stderr.startswith(f"error: `{file}` is damaged")
