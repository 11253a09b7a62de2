"""`meshllm model merge`: a model with an adapter in its weights, to serve."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshllm.cli.commands.serving import Model
from meshllm.cli.shared.local import import_heavy
from meshllm.cli.terminal import render

EXAMPLES = """\b
Examples:
  meshllm model merge Qwen/Qwen3-0.6B adapter merged
  meshllm model serve merged
"""


def merge(
    model: Model,
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="Use a folder that peft has saved.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Write to this new folder.")],
) -> None:
    """Merge a LoRA adapter into a model, which can then be served.

    `meshllm help training` says how to train one. The model and the adapter stay as they are.
    """
    with render.Status(sys.stderr) as status:
        status.show("loading torch")
        import_heavy("meshllm.model.training.merge")
        from meshllm.model.files.source import resolve
        from meshllm.model.training import merge

        own = merge.LoraAdapter.read(adapter)
        merge.merge(resolve(model), own, folder, status.show)
    render.out(str(folder))
