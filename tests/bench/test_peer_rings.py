"""Rings beside llama.cpp over RPC: what it is asked, and a whole run against stand-ins."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from meshllm.names import Quant
from tests.bench import peer_rings
from tests.bench.peer_rings import BENCH, SERVER, command_of, main, ms_of

_SERVER = """#!/usr/bin/env python3
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1])))
while True:
    server.accept()
"""


def test_servers_are_named_before_their_devices() -> None:
    options = Namespace(new_tokens=8, prompt_tokens=16)

    words = " ".join(command_of(Path("m.gguf"), "a:1,b:2", options))

    assert "--rpc a:1,b:2 -dev RPC0/RPC1 -ngl 99" in words
    assert "-t 1 -r 1 -p 0 -n 8 -d 16" in words


def test_times_are_milliseconds_of_a_token() -> None:
    assert ms_of(json.dumps([{"avg_ts": 40.0}])) == 25.0


@pytest.mark.slow
def test_a_ring_of_processes_takes_turns_with_llama(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in ((SERVER, _SERVER), (BENCH, "#!/bin/sh\necho '[{\"avg_ts\": 40.0}]'\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(peer_rings, "write_gguf", lambda _folder, _quant, file: file.touch())
    file = tmp_path / "rows.json"

    options = ["--model", "tiny", "--rounds", "1", "--new-tokens", "4", "--quants", "none"]
    assert main([*options, "--llama", str(tmp_path), "--json", str(file)]) == 0

    (row,) = json.loads(file.read_text("utf-8"))["rows"]
    assert row["width"] == Quant.NONE
    assert row["llama_ms_per_token"] == 25.0
    assert row["ratio"] == pytest.approx(25.0 / row["ms_per_token"])


def test_it_says_that_llama_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(SystemExit):
        main([])

    assert "--llama" in capsys.readouterr().err
