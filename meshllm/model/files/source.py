"""Location and config of a model, and its download.

A model is `builtin`, a folder, or ``org/name`` in the Hugging Face cache. Nothing here runs code
from a model: no remote code, no pickle, no attention kernel that a config names.
"""

import copy
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # of whichever httpx it uses
    HfHubHTTPError,
    HTTPError,
    StrictDataclassError,
)
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    __version__,
)

from meshllm.errors import ModelError, UserError
from meshllm.json_shape import check_shape
from meshllm.local_files import check_regular, check_within, read_regular
from meshllm.model.files.loader import SINGLE, first_dtype, list_weights, select
from meshllm.model.locate import (
    CONFIG,
    INDEX,
    MAX_CONFIG_BYTES,
    find_folder,
    is_model_id,
    no_config,
)
from meshllm.model.split.meta_model import Part, build, check_causal, quiet, strip
from meshllm.model.split.onemkl import warm_up_onemkl
from meshllm.model.text.pooling import POOLING_CONFIGS
from meshllm.names import Span

MAX_COUNT = 4096  # of layers, and of what else takes time and memory for each when it is built
_FRAME = re.compile(r"^Got: \w+: |\[Errno -?\d+\] ")  # what the client of the hub adds to a reason
MAX_ROUNDS = 64  # of what takes much longer for each
_LISTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks"),
    *("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"),
    *("first_k_dense_replace", "num_layers_per_stack", "num_mtp_layers"),
    *("num_attention_heads", "num_labels", "n_mamba_heads"),
)
_ROUNDS = (*("altup_num_inputs", "hc_sinkhorn_iters", "pretraining_tp"),)
COUNTS = {
    **dict.fromkeys(_LISTS, MAX_COUNT),
    **dict.fromkeys(_ROUNDS, MAX_ROUNDS),
    "heads_per_ngram": 8,
    "ngram_size": 4,
    "ngram_vocab_size_base": 1 << 28,
    "ple_layer_ids": 128,
}
"""Fields of configs that transformers counts up to in Python, and the largest value of each; of the
last ones it looks for a prime number for each head of each layer, from the base on."""
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""Config, index, tokenizer and chat template, as `fnmatch` patterns."""
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
"""Chat templates of other names that transformers reads, as a `glob` pattern."""
MAX_SMALL_BYTES = 256 << 20  # of each; the largest tokenizers have 30 MiB
MAX_CONFIG_VALUES = 1 << 20
_INVALID = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError),
    StrictDataclassError,
)
"""Raised by transformers for a config that it cannot use."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model on disk."""

    name: str
    """As the user wrote it."""
    folder: Path
    config: PreTrainedConfig
    """As stored; a text config can be nested in it."""


def resolve(
    name: str,
    *,
    offline: bool = False,
    revision: str | None = None,
    span: Span | None = None,
    download: bool = False,
    is_own: bool = True,
) -> Source:
    """Find a model by name, and with ``download`` fetch what is missing.

    With a ``span``, only the weight files that hold it are fetched; a span that begins at layer 0
    includes embedding and head, and a span that ends at the last layer includes the head. A name
    from a peer, not the user's own, never opens a folder.

    Raises:
        ModelError: there is no such model, or it cannot be run.
    """
    if download and not offline and is_model_id(name):
        return _fetch(name, revision, span)
    return open_folder(name, find_folder(name, revision, is_own=is_own))


def _check_sizes(config: PreTrainedConfig) -> None:
    # Some types take the number of layers from a list or a text.
    layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 1)
    if layers > MAX_COUNT:
        raise ValueError(f"it has {layers} layers, more than {MAX_COUNT}")
    if width < 1:
        raise ValueError(f"its `hidden_size` is {width}")


def open_folder(name: str, folder: Path) -> Source:
    """Read the config of a model.

    Raises:
        ModelError: there is no config, or transformers has no causal language model for it
            without remote code.
    """
    path, raw = folder / CONFIG, _read_config(folder)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"Model type `{model_type}` of `{name}` is unknown to transformers",
            hint="it needs remote code, which is never run"
            if "auto_map" in raw
            else f"this is version {__version__} of it; a newer one may know the type",
        )
    if "configuration_files" in raw:
        raise ModelError(f"`{path}` refers to other configs, which is not supported")
    for field, count in _counts(raw):
        if abs(count) > (most := COUNTS.get(field, MAX_COUNT)):
            raise ModelError(f"`{path}` has {count} as `{field}`, beyond {most}")
    if raw.get("quantization_config"):
        raise ModelError(
            f"The weights of `{name}` are quantised, which is not supported",
            hint="use the original weights in bfloat16",
        )
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _check_sizes(config.get_text_config(decoder=True))
    except _INVALID as error:
        raise ModelError(f"`{path}` is not a valid `{model_type}` config: {error}") from error
    check_causal(config)
    # A stored value may name a kernel repository, whose code would be fetched and run.
    config._attn_implementation = None
    config._experts_implementation = None
    return Source(name, folder, config)


def stored_dtype(source: Source) -> torch.dtype:
    """Return the dtype of a model: that of its config, else of its first float tensor."""
    named = source.config.dtype or source.config.get_text_config().dtype
    return named if isinstance(named, torch.dtype) else first_dtype(source.folder)


def needed_files(source: Source, span: Span, *, embed: bool, head: bool) -> list[str]:
    """List the weight files that hold a part of a model; reads only its config and index."""
    weights = list_weights(source.folder)
    meta_model = build(source.config, torch.float32)
    strip(meta_model, Part(span, embed, head))
    return sorted({weights[name] for name in select(meta_model, weights)})


def _fetch(name: str, revision: str | None, span: Span | None) -> Source:
    """Download the small files, then the weight files of the span, or all."""
    source = open_folder(name, _download(name, revision, SMALL_FILES))
    revision = source.folder.name  # the commit, as a branch may move meanwhile
    if not (source.folder / INDEX).is_file():
        files = [SINGLE]
    elif span is None:
        files = sorted(set(list_weights(source.folder).values()))
    else:
        files = _files_of_rank(source, span)
    folder = _download(name, revision, files)
    if files == [SINGLE] and not (folder / SINGLE).is_file():
        raise ModelError(
            f"No safetensors weights of `{name}` came from {constants.ENDPOINT}",
            hint="choose a model that has them, as pickled ones are never read; or try again",
        )
    return source


def _files_of_rank(source: Source, span: Span) -> list[str]:
    layers = source.config.get_text_config(decoder=True).num_hidden_layers
    embed, head = span.start == 0, span.stop == layers
    files = needed_files(source, span, embed=embed, head=head)
    if embed and not head:
        files += needed_files(source, Span(layers, layers), embed=False, head=True)
    return sorted(set(files))


def _download(name: str, revision: str | None, patterns: Iterable[str]) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except (OSError, HTTPError) as error:
        reason = _FRAME.sub("", str(error).strip().partition("\n")[0])
        raise ModelError(
            f"Cannot fetch `{name}` from {constants.ENDPOINT}: {reason}", hint=_advice(error)
        ) from None


def _advice(error: Exception) -> str:
    """Return what to do about a failed download."""
    if constants.HF_HUB_OFFLINE:
        return "unset `HF_HUB_OFFLINE`, or use `builtin`"
    if isinstance(error, HfHubHTTPError):
        return "check the name; set `HF_TOKEN` for a private or gated model"
    return "check the internet connection, and the space on the disk"


def _read_config(folder: Path) -> dict[str, Any]:
    """Read the config, and check the kind and size of every file in the folder."""
    path = folder / CONFIG
    try:
        data = read_regular(path, MAX_CONFIG_BYTES)
        check_shape(data, values=MAX_CONFIG_VALUES)
        raw = json.loads(data.decode())  # transformers reads no other encoding
        # Other libraries read some of them, without limits.
        nested = *folder.glob(POOLING_CONFIGS), *folder.glob(MORE_TEMPLATES)
        for each in (*folder.iterdir(), *nested):
            if each.exists() and not each.is_dir():
                is_small = _is_small(each.name)
                check_regular(each, MAX_SMALL_BYTES if is_small else sys.maxsize)
                if is_small:
                    check_within(each, folder)
    except FileNotFoundError:
        raise no_config(folder) from None
    except OSError as error:
        raise ModelError(f"`{error.filename}` cannot be read: {error.strerror}") from error
    except (ValueError, UserError) as error:
        raise ModelError(f"`{path}` cannot be read: {error}", hint="fetch it again") from None
    if not isinstance(raw, dict):
        raise ModelError(f"`{path}` cannot be read: it is not a JSON object")
    return raw


def load_stock(source: Source, dtype: torch.dtype | str) -> Any:
    """Load the whole model as transformers does; ``dtype`` may be ``auto``, as stored.

    With the config of the source, so that no kernel is used that the file of the config names.
    """
    warm_up_onemkl()
    with quiet():
        return AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=copy.deepcopy(source.config),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
        ).eval()


def _is_small(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in SMALL_FILES)


def _counts(raw: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield name and value of each count in a config or a nested one."""
    for name, value in raw.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif isinstance(value, int) and name in COUNTS:
            yield name, value
        elif isinstance(value, list) and name in COUNTS:
            yield name, len(value)
        elif isinstance(value, list) and name == "attention_types":
            yield name, sum(map(_repeated, value))


def _repeated(item: object) -> int:
    """Return how many layers an item of `attention_types` is for, or how often it is repeated."""
    match item:
        case [str() | list() | dict() as kinds, int(count), *_]:
            return max(len(kinds), 1) * max(count, 0)
    return 0
