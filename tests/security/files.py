"""Model folders and state folders that others prepared, and a charter that names a folder."""

import asyncio
import json
import os
import shutil
import subprocess
import time
from contextlib import aclosing
from pathlib import Path
from threading import Thread
from typing import Any

from meshllm.api.unix import SOCKET
from meshllm.cli.shared.client import NodeClient
from meshllm.errors import MeshError
from meshllm.model.files.source import resolve
from meshllm.request import Answer, Request
from tests.processes.fleet import ALONE, Fleet, Node, meshllm, open_fleet, until
from tests.security.attack import Attack, Outcome

TENSORS = 1_000_000
FETCHES = "fetching the configuration of the model"
OPEN_S = 5.0  # s; a model is mapped within a second
ANSWER_S = 90.0  # s; the limit of a template is a third of it
PANICS = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}}
_TRIES = {"Regex": "(?:(?:a|a){20}b|.)"}  # a million at each character: 15 ms of work
SLOW = {"pre_tokenizer": {
    "type": "Split", "pattern": _TRIES, "behavior": "Isolated", "invert": False,
}}  # fmt: skip
SLOW_CHARS = 60_000
FILES_S = 10.0  # s; starting Python and torch takes 3 s of it


def charter_names_a_folder() -> Outcome:
    """Join a mesh whose model is a folder that exists on the joiner's machine."""
    with open_fleet() as fleet:
        folder = _copy(fleet)
        ticket = fleet.create_mesh("founder")
        fleet.node("founder").start("--model", str(folder), *ALONE)
        fleet.form()
        joiner = fleet.node("joiner").start("--join", ticket, *ALONE)
        joiner.sees(FETCHES)
        until(lambda: "joiner" in fleet.node("founder").states(), fleet.told)
        time.sleep(OPEN_S)
        assert joiner.process is not None
        maps = Path(f"/proc/{joiner.process.pid}/maps").read_text("utf-8")
    is_opened = str(folder) in maps
    effect = "the folder is opened" if is_opened else "fetched from the founder, not opened"
    return Outcome(effect, "`builtin`, org/name, own --model", held=not is_opened)


def pipe_as_config() -> Outcome:
    """Show a model whose config is a pipe."""
    with open_fleet() as fleet:
        folder = _copy(fleet)
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")
        return _show(folder)


def million_tensors() -> Outcome:
    """Show a model whose weights are a header with a million empty tensors."""
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": empty for number in range(TENSORS)}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    with open_fleet() as fleet:
        folder = _copy(fleet)
        length = len(header).to_bytes(8, "little")
        (folder / "model.safetensors").write_bytes(length + header)
        return _show(folder)


def planted_lock() -> Outcome:
    """Start a node in a state folder whose lock is a link to a file of its owner."""
    with open_fleet() as fleet:
        precious = fleet.folder / "precious"
        precious.write_text("precious")
        fleet.create_mesh("victim")
        victim = fleet.node("victim")
        (victim.state / "lock").symlink_to(precious)
        code = victim.start(*ALONE).ended()
        is_whole = precious.read_text() == "precious"
    effect = f"exit {code}, the file is {'whole' if is_whole else 'lost'}"
    return Outcome(effect, "no links, own files only", held=code == 2 and is_whole)


def link_out_of_the_folder() -> Outcome:
    """Serve a model whose chat template is a link to a key; members could fetch it."""
    with open_fleet() as fleet:
        folder, key = _copy(fleet), fleet.folder / "id_ed25519"
        key.write_text("the key of the victim")
        (folder / "chat_template.jinja").symlink_to(key)
        fleet.create_mesh("victim")
        victim = fleet.node("victim").start("--model", str(folder), *ALONE)
        code = victim.ended()
        said = next((each for each in victim.stderr.splitlines() if "error" in each), "")
    held = code == 4 and "outside the folder" in said
    return Outcome(f"exit {code}: {'one line' if held else said}", "within the folder", held=held)


def _victim_with(fleet: Fleet, changes: dict[str, Any]) -> Node:
    """Serve the built-in model with another tokenizer."""
    folder = _copy(fleet)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
    fleet.create_mesh("victim")
    victim = fleet.node("victim").start("--model", str(folder), *ALONE)
    fleet.form()
    return victim


def panicking_tokenizer() -> Outcome:
    """Chat with a model whose tokenizer makes the library panic; the node lives on."""
    with open_fleet() as fleet:
        victim = _victim_with(fleet, PANICS)
        client = NodeClient(victim.state / SOCKET)
        asked = Request(turns=({"role": "user", "content": "Hi"},), max_tokens=4)
        told = [_ask(client, asked) for _ in range(2)]
        serves = victim.is_running and victim.status()["ring"]["state"] == "serving"
    effect = f"{told[0]}, {told[1]}; then the node {'serves' if serves else 'is gone'}"
    return Outcome(effect, "an error of the request", held=told == ["error"] * 2 and serves)


def endless_template() -> Outcome:
    """Chat with a model whose template does not end, then ask it without the template."""
    with open_fleet() as fleet:
        folder = _copy(fleet)
        loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "abcd")
        (folder / "chat_template.jinja").write_text(loops + "{% endfor %}" * 4)
        fleet.create_mesh("victim")
        victim = fleet.node("victim").start("--model", str(folder), *ALONE)
        fleet.form()
        client = NodeClient(victim.state / SOCKET)
        chat = _ask(client, Request(turns=({"role": "user", "content": "Hi"},)))
        raw = _ask(client, Request(raw="once", max_tokens=2))
    effect = f"chat: {chat}; then without template: {raw}"
    return Outcome(effect, "an error, then an answer", held=(chat, raw) == ("error", "answered"))


def slow_tokenizer() -> Outcome:
    """Ask a model whose tokenizer takes an hour for a text, and chat with it meanwhile."""
    with open_fleet() as fleet:
        victim = _victim_with(fleet, SLOW)
        client, told = NodeClient(victim.state / SOCKET), list[str]()
        long = Request(raw="a" * SLOW_CHARS, max_tokens=2)
        asking = Thread(target=lambda: told.append(_ask(client, long)))
        asking.start()
        time.sleep(1)
        chat = _ask(client, Request(turns=({"role": "user", "content": "Hi"},), max_tokens=4))
        is_waiting = asking.is_alive()
        asking.join()
    when = "meanwhile" if is_waiting else "then"
    effect = f"text: {told[0]}; {when} a chat: {chat}"
    held = is_waiting and (*told, chat) == ("error", "answered")
    return Outcome(effect, "an error, others go on", held=held)


def _ask(client: NodeClient, request: Request) -> str:
    """Return how a request ends."""

    async def ask() -> str:
        async with asyncio.timeout(ANSWER_S), aclosing(client.generate(request)) as events:
            kinds = [type(event) async for event in events]
        return "answered" if Answer in kinds else "nothing"

    try:
        return asyncio.run(ask())
    except TimeoutError:
        return "hangs"
    except MeshError:
        return "error"


def _copy(fleet: Fleet) -> Path:
    return Path(shutil.copytree(resolve("builtin").folder, fleet.folder / "model"))


def _show(folder: Path) -> Outcome:
    begin = time.monotonic()
    try:
        done = meshllm("model", "show", str(folder))
    except subprocess.TimeoutExpired:
        return Outcome("hangs", f"exit 4 within {FILES_S:.0f} s", held=False)
    took = time.monotonic() - begin
    held = done.returncode == 4 and took < FILES_S
    return Outcome(
        f"exit {done.returncode} in {took:.1f} s", f"exit 4 within {FILES_S:.0f} s", held
    )


ATTACKS = (
    Attack("charter names a local folder", "the folder was opened", charter_names_a_folder),
    Attack("config.json is a pipe", "hung without end", pipe_as_config),
    Attack("a million empty tensors", "24 s of work", million_tensors),
    Attack("planted `lock` link", "its target was emptied", planted_lock),
    Attack("a link to a key as template", "members could fetch it", link_out_of_the_folder),
    Attack("a tokenizer that panics", "the node was gone", panicking_tokenizer),
    Attack("a tokenizer that takes hours", "others wait as long", slow_tokenizer),
    Attack("a chat template without end", "the node hung for good", endless_template),
)
