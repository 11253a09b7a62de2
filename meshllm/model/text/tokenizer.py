"""The tokenizer and chat template of a model.

Generated text is data: nothing is escaped here (`meshllm.log.escape` is for terminals).
"""

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from math import inf
from pathlib import Path
from threading import Lock, Thread
from types import MappingProxyType
from typing import Any, Self

from jinja2 import TemplateError

from meshllm.errors import MeshError, ModelError, UserError, foreign_code
from meshllm.model.text.chat_style import ChatStyle
from meshllm.model.text.deadline import DeadlineExceeded, run_within
from meshllm.model.text.detokenizer import Detokenizer
from meshllm.model.text.generation_config import read_config, recommended
from meshllm.model.text.grammar import Vocabulary
from meshllm.model.text.pooling import LAST_ROW, Pooling, read_pooling
from meshllm.model.text.reasoning import PAIRS
from meshllm.model.text.tool_format import MARKERS, Function
from meshllm.request import Request, Turn
from meshllm.strict_json import WrongField

MAX_TEMPLATE_CHARS = 1 << 18  # untrusted code; about ten times the size of large ones
SHORT_CHARS = 2000  # a text of up to this length starts beside overdue ones that are longer
OVERDUE_SHARE = 8  # others start if they have at most 1/8 of the length of each that is overdue
PROMPT_S = 30.0  # s for a template and its tokens; 4 MiB of text, the most in a request, take 5 s

logger = logging.getLogger(__name__)

# Raised by templates in jinja2's sandbox, whose filters do not check the types of what a client
# sends; ValueError is transformers' own.
_REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    MemoryError,
)


_MARKERS = (*MARKERS, *(marker for pair in PAIRS for marker in pair))
_TAIL_TOKENS = 16
_BYTE_WORD = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's byte fallback


def _letters() -> dict[str, int]:
    """Return the letters with which byte-level BPE writes bytes (GPT-2's bytes_to_unicode)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    visible += range(ord("®"), ord("ÿ") + 1)
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


_BYTES = _letters()


class Text:
    """The tokenizer and chat template of one model.

    Not thread-safe, but for `encode` and `encode_chat`, which other threads may call. All use one
    tokenizer at the same time: a call only reads it, after its settings have been set here once.

    A call that takes too long is abandoned, but its thread runs on inside C code. Meanwhile texts
    of more than an eighth of its length are refused: this bounds the number of such threads, and
    short texts are still served.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_tokens: frozenset[int],
        defaults: Mapping[str, float] = MappingProxyType({}),
        pooling: Pooling = LAST_ROW,
    ) -> None:
        """Wrap a tokenizer of transformers; `load` is the usual way."""
        self.style = ChatStyle.of("".join(_templates(tokenizer)))
        self.end_tokens = end_tokens
        self.defaults = defaults
        """The sampling parameters that the model recommends, by name."""
        self.pooling = pooling
        """How the model embeds a text."""
        self.vocabulary: Vocabulary | None = None
        """Prepared for grammars by the first request that needs one."""
        added = tokenizer.added_tokens_decoder.items()
        special = {token for token, form in added if form.special}
        self._tokenizer = _initialised(tokenizer)
        self._texts = ThreadPoolExecutor(1, "texts")
        self._chats = ThreadPoolExecutor(1, "chats")
        self._long = ThreadPoolExecutor(1, "long-texts")
        self.grammars = ThreadPoolExecutor(2, "grammars")
        """The threads that compile grammars: none of the others has to wait for a complex one."""
        self._overdue: list[tuple[Thread, int]] = []  # with the characters of its text
        self._lock = Lock()  # of `_overdue`
        self._silent = end_tokens.union(special, tokenizer.all_special_ids)
        controls = [form.content for _, form in added if _is_control(form.content)]
        self._controls = re.compile("|".join(map(re.escape, controls))) if controls else None
        self._added: dict[int, bytes] = {token: form.content.encode() for token, form in added}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self.markers = {
            marker: token for marker in _MARKERS if (token := self._token_of(marker)) is not None
        }
        """The markers of tool calls and reasoning that are one token, and that token."""
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the tokenizer in a model's folder, without remote code and network access.

        Raises:
            ModelError: it is missing or damaged, or its chat template is too long.
        """
        tokenizer = _load(folder)
        if not all(isinstance(each, str) for each in _templates(tokenizer)):
            raise ModelError(f"A chat template in `{folder}` is not a text")
        size = max(map(len, _templates(tokenizer)))
        if size > MAX_TEMPLATE_CHARS:
            raise ModelError(
                f"The chat template in `{folder}` has {size} characters, "
                f"more than {MAX_TEMPLATE_CHARS}"
            )
        defaults = recommended(read_config(folder / "generation_config.json"))
        return cls(tokenizer, _end_tokens(folder, tokenizer), defaults, read_pooling(folder))

    @property
    def words(self) -> dict[int, str]:
        """The vocabulary by token id, special tokens included."""
        return {token: word for word, token in self._tokenizer.get_vocab().items()}

    def thread_of(self, request: Request) -> Executor:
        """Return the thread that tokenizes a prompt: raw and short, a short chat, or long."""
        if is_long(request):
            return self._long
        return self._chats if request.raw is None else self._texts

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt, with the start token if the model has one.

        Control tokens written in the text become control tokens.

        Raises:
            ModelError: the tokenizer fails, times out, or still runs for an earlier text.
        """
        _check_unicode(text)
        return self._within(len(text), "tokenizer", _tokenize, text)

    def encode_chat(
        self,
        turns: Sequence[Turn],
        functions: Sequence[Function] = (),
        thinks: bool | None = None,
        effort: str | None = None,
    ) -> list[int]:
        """Return the ids of a chat, up to the start of the answer.

        The answer may call ``functions``; ``thinks`` and ``effort`` are those of `Request`.

        Control tokens written in a turn stay plain text, so the content of a turn cannot end it;
        in names of JSON, such as those of parameters, they are refused. A
        model without a template gets the system text, then ``User: ...`` and ``Assistant: ...``, a
        blank line between turns, and ``Assistant:`` at the end.

        Raises:
            UserError: there is no turn, or the template rejects them or what is asked of it.
            ModelError: the template or the tokenizer fails, times out, or still runs for an
                earlier text.
        """
        if not turns:
            raise UserError("A chat needs at least one turn")
        for turn in turns:
            _check_unicode(turn["content"])
        length = _length(turns) + sum(len(str(each.fields)) for each in functions)
        messages = self.style.messages(turns, functions)
        if not self._tokenizer.chat_template:
            return self._within(length, "tokenizer", _tokenize, _plain(messages))
        options = self.style.options(functions, thinks, effort)
        self._check_names("messages", messages)
        self._check_names("tools", options)
        return self._within(length, "chat template", _apply_template, messages, options)

    def _check_names(self, field: str, value: object) -> None:
        """Refuse names in JSON that have control tokens: transformers sanitizes values only."""
        if self._controls and (found := self._controls.search("\n".join(_names(value)))):
            raise WrongField(field, f"A name in `{field}` contains the control token `{found[0]}`")

    def serialise(self) -> str:
        """Return the tokenizer in the JSON of the tokenizers library.

        Raises:
            UserError: it is of another library.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError("The tokenizer of the model supports no JSON schemas")
        return str(backend.to_str())

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character."""
        if token in self._added:
            return self._added[token]
        word = str(self._tokenizer.convert_ids_to_tokens(token) or "")
        if self._is_byte_level and _BYTES.keys() >= set(word):
            return bytes(_BYTES[letter] for letter in word)
        if byte := _BYTE_WORD.fullmatch(word):
            return bytes([int(byte[1], 16)])
        return word.replace("▁", " ").encode()

    def stream(self, stop: Sequence[str] = (), shown: Iterable[str] = ()) -> Detokenizer:
        """Start the detokenizer of an answer, which ends at the first of the ``stop`` texts.

        Special tokens have no text, except the ``shown`` markers.
        """
        tokens = {self.markers[marker] for marker in shown if marker in self.markers}
        return Detokenizer(self._decode, silent=self._silent - tokens, stop=stop)

    def tail(self, tokens: Sequence[int]) -> str:
        """Return the text at the end of a prompt, special tokens included."""
        return self._decode(list(tokens[-_TAIL_TOKENS:]))

    def _within(
        self, length: int, part: str, run: Callable[..., list[int]], *arguments: Any
    ) -> list[int]:
        """Run a part of the model, which may have been made to take for hours."""
        length = max(length, 1)
        with self._lock:
            self._overdue = [each for each in self._overdue if each[0].is_alive()]
            most = _longest_beside([chars for _, chars in self._overdue])
        if length > most:
            raise ModelError(
                f"The model's {part} takes no text of {length} characters now: an earlier one "
                "still runs",
                hint="shorten the text, or retry later",
            )
        try:
            return run_within(PROMPT_S, partial(run, self._tokenizer, *arguments))
        except DeadlineExceeded as exceeded:
            with self._lock:
                self._overdue += [(exceeded.thread, length)] if exceeded.thread else []
            raise ModelError(f"The model's {part} timed out after {PROMPT_S:g} s") from None
        except (MeshError, KeyboardInterrupt):
            raise
        except BaseException as error:  # foreign code in a separate thread, panics of Rust too
            logger.exception("the model's %s failed", part)
            # Its text may name folders of this node, and the asker may be another one.
            raise ModelError(f"The model's {part} failed: {type(error).__name__}") from error

    def _token_of(self, marker: str) -> int | None:
        """Return the id of a marker that is one token."""
        return next((t for t, content in self._added.items() if content == marker.encode()), None)

    def _decode(self, tokens: list[int]) -> str:
        # The clean-up removes spaces before punctuation, which would change text already emitted.
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text


def quieten() -> None:
    """Silence logs and progress bars of transformers and huggingface_hub, except with `-vv`."""
    if logging.getLogger("meshllm").isEnabledFor(logging.DEBUG):
        return
    from huggingface_hub.utils import logging as hub
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging as transformers

    disable_progress_bars()
    hub.set_verbosity(logging.ERROR)
    transformers.disable_progress_bar()
    transformers.set_verbosity_error()


_FETCH_TOKENIZER = "copy the tokenizer files of the original model into the folder"


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ModelError(f"There is no folder `{folder}`")
    quieten()

    def unreadable(error: Exception) -> ModelError:
        text = f"The tokenizer in `{folder}` is missing or damaged: {type(error).__name__}"
        return ModelError(text, hint=_FETCH_TOKENIZER)

    # The tokenizers library raises even a bare Exception.
    with foreign_code(unreadable, expected=(MeshError, MemoryError)):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    # Without its file transformers still makes a tokenizer of a known class, with no vocabulary.
    names = tokenizer.vocab_files_names.values()
    if names and not any((folder / name).is_file() for name in names):
        raise ModelError(
            f"The tokenizer in `{folder}` is missing: none of {', '.join(names)}",
            hint=_FETCH_TOKENIZER,
        )
    # The caller checks the length of a prompt; a tokenizer would only warn.
    tokenizer.model_max_length = sys.maxsize
    return tokenizer


def _initialised(tokenizer: Any) -> Any:
    """Set what the first call of a tokenizer would: a setter waits for all calls that run."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = tokenizer.split_special_tokens
    return tokenizer


def _longest_beside(overdue: Sequence[int]) -> float:
    """Return the longest text, in characters, that may begin beside the overdue ones."""
    least = min(overdue, default=inf)
    most = least / OVERDUE_SHARE
    return max(most, SHORT_CHARS) if least > SHORT_CHARS else most


def is_long(request: Request) -> bool:
    """Return whether to tokenize the prompt of a request may take seconds."""
    return length_of(request) > SHORT_CHARS


def check_vocabulary(tokens: Sequence[int], vocabulary: int) -> Sequence[int]:
    """Return the tokens of a text; raise `ModelError` if the embedding lacks any of them."""
    if (largest := max(tokens, default=0)) >= vocabulary:  # in files that do not belong together
        raise ModelError(
            f"The tokenizer of the model gives token {largest}, and its embedding has {vocabulary}",
            hint="fetch the model again",
        )
    return tokens


def length_of(request: Request) -> int:
    """Return the characters of a prompt that a client writes."""
    tools = request.tools.functions if request.tools else ""
    return len(request.raw or "") + _length(request.turns) + len(tools)


def _length(turns: Iterable[Turn]) -> int:
    """Return the characters of a chat that a client writes."""
    return sum(
        len(turn["content"]) + sum(len(call.arguments) for call in turn.get("tool_calls", ()))
        for turn in turns
    )


def _end_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Collect the end tokens of generation config, else config, and of the tokenizer."""
    configs = read_config(folder / "generation_config.json"), read_config(folder / "config.json")
    ends, others = (_ids(config.get("eos_token_id")) for config in configs)
    return (ends or others) | _ids(tokenizer.eos_token_id)


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(token for token in values if isinstance(token, int))


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The text is not valid Unicode at character {error.start}") from None


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def _apply_template(
    tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]
) -> list[int]:
    try:
        encoding = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, sanitize_control_tokens=True, **options
        )
    except _REFUSALS as error:
        raise UserError(
            f"The model's chat template rejects this chat: {error}",
            hint="alternate turns between user and assistant, or use `--raw`",
        ) from error
    return list(encoding["input_ids"])


def _templates(tokenizer: Any) -> list[str]:
    """Return the chat templates of a tokenizer; an empty one if there is none."""
    template = tokenizer.chat_template or ""
    return [*template.values()] if isinstance(template, dict) else [template]


def _is_control(token: str) -> bool:
    """Return whether an added token is not just a word or white space, as some models have."""
    return bool(token.strip()) and not token.strip().isalnum()


def _names(value: object) -> Iterator[str]:
    """Yield the names of all objects in a JSON value."""
    left = [value]
    while left:
        match left.pop():
            case dict() as fields:
                yield from map(str, fields)
                left += fields.values()
            case list() as items:
                left += items


def _plain(turns: Sequence[Mapping[str, Any]]) -> str:
    label = {"system": "", "user": "User: ", "assistant": "Assistant: "}
    return "\n\n".join([*(label[t["role"]] + t["content"] for t in turns), "Assistant:"])
