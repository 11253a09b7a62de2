"""Text to token ids and back, by the model's own tokenizer.

Model text is data: nothing is escaped here (`meshllm.log.escape` is for terminals).
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError

from meshllm.errors import ModelError, UserError
from meshllm.model.text.detokenizer import TextStream
from meshllm.request import Turn

MAX_TEMPLATE_CHARS = 1 << 18  # a stranger's code; about ten times what large ones take

# What foreign tokenizer files raise in transformers, besides what is bare (see `_load`).
_UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    RecursionError,
)
# What foreign templates raise in jinja2's sandbox; ValueError is transformers' own.
_REFUSALS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError)


class Text:
    """The tokenizer and chat template of one model; not for several threads at once."""

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int]) -> None:
        """Wrap a tokenizer of transformers; `load` is the usual way."""
        self.end_tokens = end_tokens
        added = tokenizer.added_tokens_decoder.items()
        special = {token for token, form in added if form.special}
        self._tokenizer = tokenizer
        self._silent = end_tokens.union(special, tokenizer.all_special_ids)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the tokenizer that lies beside a model; run none of its code, ask no network.

        Raises:
            ModelError: there is none, it is damaged, or its chat template is too long.
        """
        tokenizer = _load(folder)
        template = tokenizer.chat_template or ""
        size = max(map(len, template.values() if isinstance(template, dict) else [template]))
        if size > MAX_TEMPLATE_CHARS:
            raise ModelError(
                f"the chat template in `{folder}` has {size} characters, "
                f"more than {MAX_TEMPLATE_CHARS}"
            )
        return cls(tokenizer, _end_tokens(folder, tokenizer))

    @property
    def words(self) -> dict[int, str]:
        """Every token that has a word, special ones included."""
        return {token: word for word, token in self._tokenizer.get_vocab().items()}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt as it is, with the start token where the model has one.

        Control tokens written in the text become control tokens.
        """
        _check_unicode(text)
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, turns: Sequence[Turn]) -> list[int]:
        """Return the ids of a chat, up to where the answer begins.

        Control tokens written in a turn stay plain text: no one ends a turn from inside. A model
        without a template gets the system text, then ``User: ...`` and ``Assistant: ...``, a blank
        line between turns, and ``Assistant:`` at the end.

        Raises:
            UserError: there is no turn, or the template does not take these.
        """
        if not turns:
            raise UserError("a chat without a turn has no answer")
        for turn in turns:
            _check_unicode(turn["content"])
        if not self._tokenizer.chat_template:
            return self.encode(_plain(turns))
        try:
            encoding = self._tokenizer.apply_chat_template(
                list(turns), add_generation_prompt=True, sanitize_control_tokens=True
            )
        except _REFUSALS as error:
            raise UserError(
                f"the model's chat template refuses this chat: {error}",
                hint="turns usually alternate between user and assistant, or use `--raw`",
            ) from error
        return list(encoding["input_ids"])

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """Begin an answer that the first of the ``stop`` texts ends."""
        return TextStream(self._decode, silent=self._silent, stop=stop)

    def _decode(self, tokens: list[int]) -> str:
        # The clean-up removes spaces before marks: what was shown could change afterwards.
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text


def quieten() -> None:
    """Silence the news and progress bars of transformers and huggingface_hub, but not for `-vv`."""
    if logging.getLogger("meshllm").isEnabledFor(logging.DEBUG):
        return
    from huggingface_hub.utils import logging as hub
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging as transformers

    disable_progress_bars()
    hub.set_verbosity(logging.ERROR)
    transformers.disable_progress_bar()
    transformers.set_verbosity_error()


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ModelError(f"there is no folder `{folder}`")
    quieten()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # The tokenizers library raises bare Exception for a file that it does not understand.
        if type(error) is Exception or isinstance(error, _UNREADABLE):
            raise ModelError(f"the tokenizer in `{folder}` is missing or damaged") from error
        raise
    # Without its file a tokenizer of a known class is made all the same, with no words in it.
    names = tokenizer.vocab_files_names.values()
    if names and not any((folder / name).is_file() for name in names):
        raise ModelError(f"the tokenizer in `{folder}` is missing: none of {', '.join(names)}")
    # How long a prompt may be is found out by whoever knows the model; a tokenizer only warns.
    tokenizer.model_max_length = sys.maxsize
    return tokenizer


def _end_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Collect what ends an answer: generation config, else config, and the tokenizer's own."""
    ends = _eos(folder / "generation_config.json") or _eos(folder / "config.json")
    return ends | _ids(tokenizer.eos_token_id)


def _eos(path: Path) -> frozenset[int]:
    try:
        config = json.loads(path.read_bytes())
        return _ids(config.get("eos_token_id"))
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"`{path}` is damaged") from error


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(token for token in values if isinstance(token, int))


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text is not valid Unicode at character {error.start}") from None


def _plain(turns: Sequence[Turn]) -> str:
    label = {"system": "", "user": "User: ", "assistant": "Assistant: "}
    return "\n\n".join([*(label[t["role"]] + t["content"] for t in turns), "Assistant:"])
