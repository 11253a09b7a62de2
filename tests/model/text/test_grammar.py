import json
import signal
import subprocess
from math import inf

import pytest
import torch

from meshllm.errors import Busy, ModelError
from meshllm.model.files.source import resolve
from meshllm.model.text import grammar, grammar_trial
from meshllm.model.text.grammar import MAX_SCHEMA_BYTES, Vocabulary
from meshllm.model.text.tokenizer import Text
from meshllm.strict_json import WrongField

SIZE = 6144
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def text() -> Text:
    return Text.load(resolve("builtin").folder)


@pytest.fixture(scope="module")
def vocabulary(text: Text) -> Vocabulary:
    return Vocabulary(text.serialise(), text.end_tokens)


def tokens_of(vocabulary: Vocabulary, words: str) -> list[int]:
    return vocabulary._tokens.greedy_tokenize(words)


def test_only_tokens_that_can_follow_keep_their_logits(text: Text, vocabulary: Vocabulary) -> None:
    grammar, logits = vocabulary.json_schema(PERSON), torch.ones(SIZE)

    first = grammar.masked(logits)
    grammar.take(tokens_of(vocabulary, '{"age":'))
    second = grammar.masked(logits)

    opening = {word for token, word in text.words.items() if first[token] > -inf}
    assert opening == {"{"}
    allowed = {
        text.token_bytes(token).decode().strip() for token in range(SIZE) if second[token] > -inf
    }
    assert {"1", "-"} <= allowed
    assert '"' not in allowed
    assert bool((logits == 1).all())


def test_at_the_end_only_the_end_token_follows(text: Text, vocabulary: Vocabulary) -> None:
    grammar = vocabulary.json_schema(PERSON)
    grammar.take(tokens_of(vocabulary, '{"age":7}'))

    masked = grammar.masked(torch.zeros(SIZE))

    assert {token for token in range(SIZE) if masked[token] > -inf} == text.end_tokens
    grammar.take(list(text.end_tokens))


def test_logits_behind_the_vocabulary_are_masked(vocabulary: Vocabulary) -> None:
    masked = vocabulary.json_schema(PERSON).masked(torch.zeros(SIZE + 100))

    assert len(masked) == SIZE + 100
    assert bool((masked[SIZE:] == -inf).all())


def test_tokens_that_do_not_follow_are_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(ModelError, match=r"does not follow its grammar: .* doesn't satisfy"):
        vocabulary.json_schema(PERSON).take(tokens_of(vocabulary, '{"name"'))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "str"},
        {"not": {"type": "string"}},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "(" * 50},
        {"type": "string", "description": "x" * MAX_SCHEMA_BYTES},
    ],
    ids=["type", "not", "remote", "pointer", "pattern", "size"],
)
def test_a_schema_that_is_not_supported_is_refused_by_name(
    vocabulary: Vocabulary, schema: dict[str, object]
) -> None:
    with pytest.raises(WrongField) as refused:
        vocabulary.json_schema(json.dumps(schema))

    assert refused.value.name == "response_format"
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("schema", ["", "{", "3"])
def test_an_invalid_schema_is_refused(vocabulary: Vocabulary, schema: str) -> None:
    with pytest.raises(WrongField):
        vocabulary.json_schema(schema)


def test_a_model_without_end_token_follows_no_schema(text: Text) -> None:
    with pytest.raises(ModelError, match="no end token"):
        Vocabulary(text.serialise(), ())


def test_a_tokenizer_that_is_not_supported_is_an_error() -> None:
    with pytest.raises(ModelError):
        Vocabulary("{}", [1])


ENDLESS = json.dumps({"allOf": [{"type": "integer", "multipleOf": each} for each in (9973, 9967)]})
"""It takes the compiler minutes, which nothing can interrupt."""


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the trial of a grammar may take long, but not much of its processor."""
    monkeypatch.setattr(grammar_trial, "CPU_S", 1)
    monkeypatch.setattr(grammar, "TRIAL_S", 600.0)


@pytest.mark.usefixtures("busy")
def test_a_schema_that_takes_too_long_is_refused_by_name(vocabulary: Vocabulary) -> None:
    with pytest.raises(WrongField, match="takes more than 1 s to compile") as caught:
        vocabulary.json_schema(ENDLESS)

    assert caught.value.name == "response_format"


@pytest.mark.usefixtures("busy")
def test_arguments_that_take_too_long_are_refused_by_name(vocabulary: Vocabulary) -> None:
    def lark(token: int) -> str:
        return f"%llguidance {{}}\nstart: <[{token}]> args\nargs: %json {ENDLESS}"

    with pytest.raises(WrongField, match="takes more than 1 s to compile") as caught:
        vocabulary.tool_calls(lark(SIZE - 1), lark(grammar_trial.TOKEN))

    assert caught.value.name == "tools"


def test_a_grammar_is_tried_once(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary.json_schema(PERSON)
    monkeypatch.setattr(grammar_trial, "__file__", "missing")

    vocabulary.json_schema(PERSON)
    with pytest.raises(RuntimeError, match="missing"):
        vocabulary.json_schema(PERSON + " ")


def test_a_machine_that_is_too_busy_says_so(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "TRIAL_S", 0.0)

    with pytest.raises(Busy, match="not compiled within 0 s"):
        vocabulary.json_schema('{"const": "busy"}')


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_trial_that_others_end_is_busy_and_not_remembered(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    schema = json.dumps({"const": number.name})
    with monkeypatch.context() as patch:
        ended = subprocess.CompletedProcess[bytes]("trial", -number)
        patch.setattr(subprocess, "run", lambda *_, **__: ended)
        with pytest.raises(Busy, match="the system ended the process"):
            vocabulary.json_schema(schema)

    vocabulary.json_schema(schema)


def test_a_system_without_processes_is_busy(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "CPU_S", 0x7FFFFFFF)  # not remembered

    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "run", fail)

    with pytest.raises(Busy, match="Resource temporarily unavailable"):
        vocabulary.json_schema(PERSON)


def test_an_answer_that_has_begun_gets_more_of_the_processor(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = list[str]()

    def note(words: tuple[str, ...], **_: object) -> "subprocess.CompletedProcess[bytes]":
        seconds.append(words[-1])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", note)
    for has_begun in (False, True):
        vocabulary.json_schema('{"const": "begun"}', has_begun=has_begun)

    assert seconds == [str(grammar_trial.CPU_S), str(grammar_trial.BEGUN_CPU_S)]


@pytest.mark.parametrize("schema", ['{"$ref": "#"}', '{"allOf": [{"$ref": "#"}]}'])
def test_a_schema_without_solution_is_refused(vocabulary: Vocabulary, schema: str) -> None:
    with pytest.raises(WrongField, match=r"not supported: Unsatisfiable schema$"):
        vocabulary.json_schema(schema)


def test_an_invalid_grammar_is_refused_when_it_is_compiled(vocabulary: Vocabulary) -> None:
    with pytest.raises(WrongField, match="A JSON schema is not supported"):
        vocabulary.tool_calls("start: nowhere", "start: nowhere")
