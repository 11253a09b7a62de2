"""The folder of a model, found without reading its files or importing torch."""

import re
from importlib import resources
from pathlib import Path

from meshllm.errors import ModelError, ModelMissing

BUILTIN = "builtin"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 16 << 20  # also of other small JSON files of a model

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
        return Path(name)
    if not is_own and not is_repository(name):
        raise ModelMissing(
            f"The model of the mesh, `{name}`, is not a name of the Hugging Face hub",
            hint="say where this machine has it: `--model FOLDER`",
        )
    if is_own and not is_model_id(name):
        raise ModelError(
            f"There is no folder `{name}`, and it is not a model id",
            hint="use `builtin`, a folder, or `org/name` from the Hugging Face hub",
        )
    from huggingface_hub import constants, try_to_load_from_cache  # takes 0.2 s

    found = try_to_load_from_cache(name, CONFIG, revision=revision)
    if not isinstance(found, str):
        raise ModelMissing(
            f"There is no model `{name}`: no such folder, and not in `{constants.HF_HUB_CACHE}`",
            hint=f"fetch it with `meshllm model pull {name}`",
        )
    return Path(found).parent


def is_folder(name: str) -> bool:
    """Return whether a name is that of a folder."""
    return name != "" and Path(name).is_dir()


def is_model_id(name: str) -> bool:
    """Return whether a name is ``org/name``, and not that of a folder."""
    return name != BUILTIN and not is_folder(name) and is_repository(name)


def is_repository(name: str) -> bool:
    """Return whether a name has the form ``org/name``."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return _MODEL_ID.fullmatch(name) is not None
