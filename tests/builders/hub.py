"""A fake Hugging Face hub: the parts of its HTTP API that a download uses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves folders as models under ``org/name``; records which files were fetched."""

    daemon_threads = True

    def __init__(self, models: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.fetched: list[str] = []

    @property
    def endpoint(self) -> str:
        """The value for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def open_hub(models: dict[str, Path]) -> Iterator[Hub]:
    """Serve until the end of the context."""
    with Hub(models) as hub:
        thread = Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self) -> None:
        match unquote(self.path.partition("?")[0]).strip("/").split("/"):
            case ["api", "models", org, name, *rest] if folder := self._folder(org, name):
                self._tell(f"{org}/{name}", folder, rest)
            case [org, name, "resolve", _, file] if folder := self._folder(org, name):
                self._send(folder / file)
            case _:
                self._reply(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _folder(self, org: str, name: str) -> Path | None:
        return self.server.models.get(f"{org}/{name}")

    def _tell(self, name: str, folder: Path, rest: list[str]) -> None:
        files = [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": COMMIT}
            for path in sorted(folder.iterdir())
        ]
        if rest[:1] == ["tree"]:
            self._reply(200, json.dumps(files).encode())
            return
        info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": f["path"]} for f in files]}
        self._reply(200, json.dumps(info).encode())

    def _send(self, path: Path) -> None:
        if not path.is_file():
            self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = path.read_bytes()
        if self.command == "GET":
            self.server.fetched.append(path.name)
        etag = f'"{sha256(data).hexdigest()}"'
        self._reply(200, data, {"ETag": etag, "X-Repo-Commit": COMMIT})

    def _reply(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
