"""`--outline`: its optional value, and backends that answer by outline."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from meshllm.cli.shared.local import Opener
from meshllm.config import Settings
from meshllm.errors import UserError
from meshllm.request import Backend, Request

if TYPE_CHECKING:
    from meshllm.outline.eligibility import OutlineMode

_FLAG = "--outline"


class OptionalOutline(TyperCommand):
    """A command whose `--outline` takes a value only after `=`, as typer has no such options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; a plain `--outline` is `--outline=on`."""
        options = args.index("--") if "--" in args else len(args)
        whole = [f"{_FLAG}=on" if each == _FLAG else each for each in args[:options]]
        return super().parse_args(ctx, [*whole, *args[options:]])


def mode_of(text: str) -> "OutlineMode":
    """Parse the value of `--outline`; raise `UserError` if it is unknown."""
    from meshllm.outline.eligibility import OutlineMode

    if text not in tuple(OutlineMode):
        raise UserError(
            f"Invalid value `{text}` for `{_FLAG}`", hint="`--outline` or `--outline=auto`"
        )
    return OutlineMode(text)


def check_outline(mode: "OutlineMode | None", request: Request) -> None:
    """Raise `UserError` if a request that must be outlined cannot be."""
    if mode != "on":
        return
    from meshllm.outline.eligibility import objection

    if error := objection(request):
        raise error


def outlined(opener: Opener, mode: "OutlineMode | None") -> Opener:
    """Return a function that opens the same backend, answering by outline if there is a mode."""
    if mode is None:
        return opener

    @asynccontextmanager
    async def opened(settings: Settings) -> AsyncIterator[Backend]:
        from meshllm.outline.backend import OutlineBackend

        async with opener(settings) as backend:
            yield OutlineBackend(backend, mode)

    return opened
