"""`meshllm chat`: one answer or a conversation, from any backend."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshllm.cli.chat.backends import ANY_MODEL, choose
from meshllm.cli.chat.conversation import Conversation, request_of, with_system
from meshllm.cli.chat.outlined import OptionalOutline, check_outline, mode_of, outlined
from meshllm.cli.chat.prompt import read_prompt
from meshllm.cli.shared.answer import as_fields, stream
from meshllm.cli.shared.local import Opener, import_heavy, open_local
from meshllm.cli.shared.options import Json, check_draft, settings, takes
from meshllm.cli.terminal import render
from meshllm.config import Scalar, Settings
from meshllm.errors import UserError
from meshllm.request import Answer, Request, Turn

if TYPE_CHECKING:
    from meshllm.outline.eligibility import OutlineMode

MAX_SCHEMA_BYTES = 1 << 20

COMMAND = OptionalOutline
EXAMPLES = """\b
Examples:
  meshllm chat
  meshllm chat --nodes 3 "What is a ring?"
  meshllm chat "Summarise this:" < notes.txt
  echo "What is a span?" | meshllm chat --json
  meshllm chat --join "$(cat ticket)" "What is a span?"
  meshllm chat --schema person.json "Invent a person"
  meshllm chat --outline --max-tokens 1000 "What makes a city worth living in?"
  meshllm chat --seed 7 --temperature 0.9 "Tell me a story about a fox"
"""


_WAITS = "still reading standard input, a part of the prompt; `< /dev/null` skips it"


@takes(
    "model", "nodes", "transport", "ends", "dtype", "quant", "device", "threads", "speculation",
    "draft", "exact", "wire", "prefix_cache", "state", "join", "system",
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "frequency_penalty", "presence_penalty", "seed", "plain",
)  # fmt: skip
def chat(
    context: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Send this prompt; `-` reads it from stdin."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="Stop generating at this text; repeatable."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt without the chat template.")
    ] = False,
    schema: Annotated[
        Path | None,
        typer.Option(
            "--schema", metavar="FILE", help="Answer in JSON that satisfies this JSON schema."
        ),
    ] = None,
    thinks: Annotated[
        bool | None,
        typer.Option("--think/--no-think", help="Whether to reason first, if the model can."),
    ] = None,
    outline: Annotated[
        str | None,
        typer.Option(
            "--outline",
            metavar="[=auto]",
            help="Outline the answer and write its points in parallel; auto: if it suits.",
        ),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print the timings of each hop to stderr.")
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print no notes, such as which mesh reads the prompt."),
    ] = False,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Ask one question or hold a conversation.

    The node running on this machine answers. Without one, or with `--nodes`, chat runs a ring in
    this process. With `--join` it is a client of the ticket's mesh and loads no weights.

    Notes on stderr name the mesh if another machine reads the prompt, and say why an answer was
    cut.

    With PROMPT or piped text it prints one answer, and nothing else, to stdout. Piped text is put
    before PROMPT: stdin is read to its end, unless it is a terminal. On a terminal without PROMPT
    it opens a conversation. Its answers are rendered as Markdown unless `--plain`.

    A terminal shows the reasoning of a model dimmed, on stderr.
    """
    chosen = settings(flags)
    check_draft(chosen)
    if raw and thinks is not None:
        raise UserError("`--raw` cannot be combined with `--think`", hint="omit one of them")
    wanted = _read_schema(schema) if schema else None
    mode = None if outline is None else mode_of(outline)
    text = read_prompt(
        prompt, sys.stdin, waits=lambda: None if quiet else render.print_message(_WAITS)
    )
    ends = tuple(stop or ())
    opener: Opener
    where = ""
    if callable(context.obj):  # tests pass a backend
        opener = context.obj
    else:
        shows_model = text is None or as_json
        opener, chosen, where = choose(
            chosen, flags, shows_model=shows_model, quiet=quiet, names_hops=not as_json
        )
    if text is None:
        if as_json or raw:
            raise UserError("`--json` and `--raw` need a prompt", hint="pass PROMPT, or pipe it in")
        from meshllm.cli.chat.repl import converse

        conversation = Conversation(chosen, ends, wanted, thinks, where=where)
        check_outline(mode, conversation.request(""))
        converse(opener, conversation, mode, stats=stats, quiet=quiet)
        return
    request = replace(_request(text, chosen, ends, raw=raw), schema=wanted, thinks=thinks)
    check_outline(mode, request)
    answer = _answer_once(opener, chosen, request, mode, as_json=as_json, quiet=quiet)
    if as_json:
        seed = request.sampling.seed
        model = None if chosen.model == ANY_MODEL else chosen.model
        render.dump({"model": model, **as_fields(answer), "seed": seed})
    if stats:
        render.print_message(f"{render.statistics(answer)}\nseed {request.sampling.seed}")


def _read_schema(path: Path) -> str:
    from meshllm.local_files import hint_of, read_regular, reason_of

    try:
        return read_regular(path, MAX_SCHEMA_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        text = f"Cannot read the JSON schema `{path}`: {reason_of(error)}"
        raise UserError(text, hint=hint_of(error)) from None


def _request(text: str, chosen: Settings, stop: tuple[str, ...], *, raw: bool) -> Request:
    if raw and chosen.system:
        raise UserError("`--raw` cannot be combined with a system prompt", hint="omit one of them")
    if raw:
        return request_of(chosen, raw=text, stop=stop)
    turns = with_system(chosen, Turn(role="user", content=text))
    return request_of(chosen, turns=turns, stop=stop)


def _answer_once(
    opener: Opener,
    chosen: Settings,
    request: Request,
    mode: "OutlineMode | None",
    *,
    as_json: bool,
    quiet: bool,
) -> Answer:
    from meshllm.node import event_loop

    with render.Status(sys.stderr, is_quiet=quiet) as status, render.answering() as write:
        status.show(f"waiting for {chosen.model}")
        if opener is open_local:
            status.show(f"loading {chosen.model}")
            import_heavy()

        async def once() -> Answer:
            async with outlined(opener, mode)(chosen) as ring:
                shown = _nowhere if as_json else write
                return await stream(ring, request, status, shown, may_outline=mode is not None)

        return event_loop.run(once())


def _nowhere(_: str) -> None:
    """Ignore a piece: the JSON object at the end has the whole text."""
