import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshllm.request import Event, Sampling
from tests.builders.fake_ring import FakeRing
from tests.cli.conftest import Invoke

ROOT = Path(__file__).parents[3]
FAKE = "import sys; from tests.builders.fake_ring import main; main()"


def test_stdout_is_the_answer_and_nothing_else(meshllm: Invoke) -> None:
    result = meshllm("chat", "hello there")

    assert (result.exit_code, result.stdout, result.stderr) == (0, "You said: hello there\n", "")


def test_piped_text_comes_before_the_argument(meshllm: Invoke, ring: FakeRing) -> None:
    meshllm("chat", "Sum this up:", stdin="line one\nline two\n")

    assert ring.requests[0].turns[0]["content"] == "line one\nline two\n\nSum this up:"


def test_every_flag_reaches_the_ring(meshllm: Invoke, ring: FakeRing) -> None:
    words = (
        "--model m --nodes 3 --transport loopback --ends client --dtype bfloat16 --threads 2 "
        "--max-tokens 9 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 "
        "--repetition-penalty 1.1 --frequency-penalty 0.2 --presence-penalty 0.3 --seed 7 "
        "--system short --stop END --stop FIN --wire int8 --draft small"
    )

    result = meshllm("chat", *words.split(), "hi")

    settings, request = ring.settings, ring.requests[0]
    assert result.exit_code == 0, result.output
    assert settings is not None
    assert (settings.model, settings.nodes, settings.ends, settings.dtype, settings.threads) == (
        "m", 3, "client", "bfloat16", 2,
    )  # fmt: skip
    assert (settings.wire, settings.draft) == ("int8", "small")
    assert request.sampling == Sampling(0.5, 4, 0.9, 0.1, 1.1, 0.2, 0.3, 7)
    assert (request.max_tokens, request.stop) == (9, ("END", "FIN"))
    assert [turn["role"] for turn in request.turns] == ["system", "user"]


@pytest.mark.parametrize("words", ["--exact", "--speculation off"])
def test_a_draft_without_speculation_is_refused(
    meshllm: Invoke, ring: FakeRing, words: str
) -> None:
    result = meshllm("chat", "--draft", "builtin", *words.split(), "hi")

    assert (result.exit_code, ring.requests) == (2, [])
    assert result.stderr == (
        f"error: `--draft` cannot be combined with `{words}`, which disables speculation\n"
        "hint: omit one of them\n"
    )


def test_raw_uses_the_prompt_as_it_is(meshllm: Invoke, ring: FakeRing) -> None:
    meshllm("chat", "--raw", "once upon")

    assert (ring.requests[0].raw, ring.requests[0].turns) == ("once upon", ())


def test_a_cut_answer_is_noted_on_stderr_unless_quiet(meshllm: Invoke) -> None:
    said = meshllm("chat", "--max-tokens", "2", "hello")
    quiet = meshllm("chat", "--max-tokens", "2", "--quiet", "hello")

    assert said.stderr == "the answer was cut after 3 tokens by `max_tokens`\n"
    assert (said.stdout, quiet.stdout) == ("You said: hello\n", "You said: hello\n")
    assert (said.exit_code, quiet.exit_code, quiet.stderr) == (0, 0, "")


def test_a_schema_that_cannot_be_read_is_named(meshllm: Invoke) -> None:
    result = meshllm("chat", "--schema", "gone.json", "hello")

    assert result.exit_code == 2
    assert result.stderr == (
        "error: Cannot read the JSON schema `gone.json`: no such file or directory\n"
        "hint: check the path\n"
    )


def test_json_is_one_object(meshllm: Invoke) -> None:
    result = meshllm("chat", "--json", "--nodes", "2", "hello")

    answer = json.loads(result.stdout)
    assert answer.pop("seed") in range(2**31)
    assert answer == {
        "schema": 1,
        "model": "builtin",
        "text": "You said: hello",
        "reasoning": "",
        "tokens": [0, 1, 2],
        "completion_tokens": 3,
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "finish_reason": "stop",
        "ttft_ms": 20.0,
        "ms_per_token": 4.0,
        "tokens_per_second": 250.0,
        "tokens_per_step": 1.0,
        "hops": [
            {
                "rank": 0,
                "node": "node-0",
                "layers": "0:4",
                "compute_ms": 1.25,
                "serialise_ms": 0.08,
                "queue_ms": 0.02,
                "wire_ms": 0.05,
                "bytes_per_token": 512.0,
            },
            {
                "rank": 1,
                "node": "node-1",
                "layers": "4:8",
                "compute_ms": 1.5,
                "serialise_ms": 0.09,
                "queue_ms": 0.03,
                "wire_ms": 0.06,
                "bytes_per_token": 512.0,
            },
        ],
    }


def test_stats_go_to_stderr(meshllm: Invoke) -> None:
    result = meshllm("chat", "--stats", "hello")

    assert result.stdout == "You said: hello\n"
    assert "250.0 tokens/s" in result.stderr
    assert "   1  node-1  4:8 " in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("chat", ""), "The prompt is empty"),
        (("chat",), "The prompt is empty"),
        (
            ("chat", "--raw", "--system", "s", "hi"),
            "`--raw` cannot be combined with a system prompt",
        ),
        (("chat", "--nodes", "0", "hi"), "`nodes` is 0, not between 1 and 1024 (--nodes)"),
        (("chat", "--top-p", "1.5", "hi"), "`top_p` is 1.5, not between 0 and 1 (--top-p)"),
    ],
)
def test_an_invalid_request_is_refused_before_a_ring_forms(
    meshllm: Invoke, ring: FakeRing, words: tuple[str, ...], message: str
) -> None:
    result = meshllm(*words)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}\n")
    assert ring.settings is None


def test_stdin_that_is_not_utf8_is_refused(meshllm: Invoke) -> None:
    result = meshllm("chat", stdin=b"caf\xe9 noir")

    assert result.exit_code == 2
    assert "Standard input is not UTF-8: byte 0xe9 at offset 3\n" in result.stderr


def test_a_ring_that_ends_without_an_answer_is_a_bug(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> AsyncIterator[Event]:
        for event in list[Event]():
            yield event

    monkeypatch.setattr(FakeRing, "generate", nothing)

    result = meshllm("chat", "hi")

    assert result.exit_code == 1
    assert "the ring ended without an answer" in result.stderr


def _start(*words: str) -> subprocess.Popen[bytes]:
    """Run a command line in a subprocess, with the same fake ring."""
    return subprocess.Popen(
        [sys.executable, "-c", FAKE, "chat", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_a_closed_pipe_ends_the_command_silently() -> None:
    with _start("loop") as process:
        assert process.stdout is not None
        assert process.stderr is not None

        first = process.stdout.read(1)
        process.stdout.close()
        told = process.stderr.read()

    assert (first, told, process.returncode) == (b"Y", b"cancelled 1, open False\n", 141)


def test_an_interrupt_cancels_the_session() -> None:
    with _start("loop") as process:
        assert process.stdout is not None
        process.stdout.read(20)

        process.send_signal(signal.SIGINT)
        said, told = process.communicate()

    assert (said[-1:], told, process.returncode) == (b"\n", b"cancelled 1, open False\n", 130)


def test_pipes_get_no_colour_and_no_status_line() -> None:
    with _start("--model", "missing", "hi") as process:
        said, told = process.communicate()

    assert (said, told) == (b"", b"error: There is no model `missing`\n")
    assert process.returncode == 4


def test_a_full_disk_is_reported_on_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        told = subprocess.run(
            [sys.executable, "-c", FAKE, "chat", "hi"],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=False,
        )

    assert told.returncode == 1
    assert told.stderr.startswith(b"error: Standard output cannot be written: No space left")


def test_a_raw_prompt_has_no_switch_for_reasoning(meshllm: Invoke) -> None:
    result = meshllm("chat", "--raw", "--no-think", "once upon")

    assert result.exit_code == 2
    assert "`--raw` cannot be combined with `--think`" in result.stderr
