"""The folder of a model, found without reading its files or importing torch."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from meshllm.config import cache_path
from meshllm.errors import ModelError, ModelMissing

BUILTIN = "builtin"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 16 << 20  # also of other small JSON files of a model
GGUF = (
    "GGUF is not read: use the original safetensors model, or run llama.cpp's server and "
    "`meshllm provide` it"
)

_MODEL_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find_folder(name: str, revision: str | None = None, *, is_own: bool = True) -> Path:
    """Find a model on this machine: `builtin`, a folder, or ``org/name`` in the Hub's cache.

    A name that is not the user's own, but came from a peer, does not name a folder.

    Raises:
        ModelError: there is no such model.
    """
    if name == BUILTIN:
        return Path(str(resources.files("meshllm.model") / BUILTIN / "weights"))
    if is_own and is_folder(name):
        return _path(name)
    if not is_own and not is_repository(name):
        raise ModelMissing(
            f"The model of the mesh, `{name}`, is not a name of the Hugging Face hub",
            hint="say where this machine has it: `--model FOLDER`",
        )
    if is_own and not is_model_id(name):
        raise _not_a_model(name)
    from huggingface_hub import constants, try_to_load_from_cache  # takes 0.2 s

    found = try_to_load_from_cache(name, CONFIG, revision=revision)
    if not isinstance(found, str):
        raise ModelMissing(
            f"There is no model `{name}`: no such folder, and not in `{constants.HF_HUB_CACHE}`",
            hint=f"fetch it with `meshllm model pull {name}`",
        )
    return Path(found).parent


def find_installed(name: str) -> Path:
    """Find a model as `find_folder` does, else among those that are `fetched`.

    Raises:
        ModelError: there is no such model.
    """
    try:
        return find_folder(name)
    except ModelError:
        with suppress(StopIteration):
            return next(folder for found, folder in fetched() if found == name)
        raise


def weights_path() -> Path:
    """Return the folder of what nodes of this user fetch from others."""
    return cache_path() / "weights"


def fetched() -> Iterator[tuple[str, Path]]:
    """Yield name and folder of what nodes of this user have fetched, parts of models mostly."""
    for index in sorted(weights_path().glob(f"*/{INDEX}")):
        try:
            name = str(json.loads(index.read_text())["metadata"]["name"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            name = index.parent.name
        yield name, index.parent


def is_folder(name: str) -> bool:
    """Return whether a name is that of a folder."""
    return name != "" and os.path.isdir(_path(name))  # noqa: PTH112  # never raises


def is_model_id(name: str) -> bool:
    """Return whether a name is ``org/name``, and not that of a folder or file."""
    is_there = os.path.exists(_path(name))  # noqa: PTH110  # never raises
    return name != BUILTIN and not is_there and is_repository(name)


def is_repository(name: str) -> bool:
    """Return whether a name has the form ``org/name``."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return _MODEL_ID.fullmatch(name) is not None


def no_config(folder: Path) -> ModelError:
    """Make the error for a folder without a config, with what is there instead."""
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return ModelError(f"`{folder}` has no `{CONFIG}`, only `{ggufs[0]}`", hint=GGUF)
    return ModelError(f"`{folder}` has no `{CONFIG}`", hint="choose a model folder")


def _path(name: str) -> Path:
    """Return the path of a name, with the `~` that shells leave in ``--model=~/model``."""
    is_home = name.startswith("~/")
    return Path(os.path.expanduser(name) if is_home else name)  # noqa: PTH111  # never raises


def _not_a_model(name: str) -> ModelError:
    """Make the error for a name that is neither of a folder nor of the hub."""
    if name and os.path.isfile(_path(name)):  # noqa: PTH113  # never raises
        hint = GGUF if name.endswith(".gguf") else "name the folder that it is in"
        return ModelError(f"`{name}` is a file, not a model folder", hint=hint)
    close = get_close_matches(name.lower(), known := _known(), n=1)
    return ModelError(
        f"There is no folder `{name}`, and it is not a model id",
        hint=f"did you mean `{known[close[0]]}`?"
        if close
        else "use `builtin`, a folder, or `org/name`, fetched by `meshllm model pull org/name`",
    )


def _known() -> dict[str, str]:
    """Return the names of models on this machine, by what a user may write for them."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*--*")
    ids = ["/".join(each.name.split("--")[1:]) for each in folders]
    short = {each.rpartition("/")[2].lower(): each for each in ids}
    return {BUILTIN: BUILTIN} | short | {each.lower(): each for each in ids}
