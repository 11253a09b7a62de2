"""Grammars of tool calls: what they allow parses as the call, in each format."""

import json
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from meshllm.errors import ModelError, UserError
from meshllm.model.text import grammar_trial
from meshllm.model.text.grammar import Vocabulary
from meshllm.model.text.tool_format import (
    MARKERS,
    MAX_TOOLS,
    Function,
    ToolFormat,
    call_grammar,
    instructions,
)
from meshllm.request import Tools
from meshllm.strict_json import WrongField

CITY: dict[str, Any] = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/name"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"name": {"type": "string"}},
    },
}
PLAIN: dict[str, Any] = {"name": "g_2"}
WRITTEN = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>',
    ToolFormat.XML: '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>',
    ToolFormat.MISTRAL: '[TOOL_CALLS][{"name": "f", "arguments": {"city": "Rome"}}]',
    ToolFormat.ARGS: '[TOOL_CALLS]f[ARGS]{"city": "Rome"}',
    ToolFormat.LLAMA: '{"name": "f", "parameters": {"city": "Rome"}}',
    ToolFormat.JSON: '{"name": "f", "arguments": {"city": "Rome"}}',
}
TWICE = {
    ToolFormat.HERMES: f"{WRITTEN[ToolFormat.HERMES]}\n{WRITTEN[ToolFormat.HERMES]}",
    ToolFormat.ARGS: 2 * WRITTEN[ToolFormat.ARGS],
    ToolFormat.MISTRAL: WRITTEN[ToolFormat.MISTRAL][:-1]
    + ', {"name": "g_2", "arguments": {"x": 1}}]',
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return a tokenizer of letters, with every marker as one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"])
    tokenizer.add_tokens([AddedToken(each, special=False) for each in MARKERS[:2]])
    return tokenizer


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.to_str(), [tokenizer.get_vocab()["<|end|>"]])


def tools_of(*functions: dict[str, Any], required: bool = True, parallel: bool = True) -> Tools:
    return Tools(json.dumps(functions), required, parallel)


def follows(
    vocabulary: Vocabulary, tokenizer: Tokenizer, tools: Tools, form: ToolFormat, text: str
) -> bool:
    """Return whether text may be the whole answer."""
    special = {each: tokenizer.get_vocab()[each] for each in MARKERS}
    lark = call_grammar(tools, form, special)
    assert lark is not None
    trial = call_grammar(tools, form, dict.fromkeys(special, grammar_trial.TOKEN))
    assert trial is not None
    grammar = vocabulary.tool_calls(lark, trial)
    try:
        grammar.take(tokenizer.encode(text).ids)
    except ModelError:
        return False
    end = tokenizer.get_vocab()["<|end|>"]
    return bool(grammar.masked(torch.zeros(tokenizer.get_vocab_size()))[end] == 0)


@pytest.mark.parametrize("form", ToolFormat)
def test_a_required_call_is_all_that_may_follow(
    vocabulary: Vocabulary, tokenizer: Tokenizer, form: ToolFormat
) -> None:
    tools, call = tools_of(CITY, PLAIN), WRITTEN[form]

    assert follows(vocabulary, tokenizer, tools, form, call)
    assert not follows(vocabulary, tokenizer, tools, form, "Rome is nice.")
    assert not follows(vocabulary, tokenizer, tools, form, call.replace("city", "town"))
    assert not follows(vocabulary, tokenizer, tools, form, call.replace("f", "h", 1))


@pytest.mark.parametrize("form", TWICE)
def test_parallel_calls_can_be_forbidden(
    vocabulary: Vocabulary, tokenizer: Tokenizer, form: ToolFormat
) -> None:
    many, single = tools_of(CITY, PLAIN), tools_of(CITY, PLAIN, parallel=False)

    assert follows(vocabulary, tokenizer, many, form, TWICE[form])
    assert not follows(vocabulary, tokenizer, single, form, TWICE[form])


@pytest.mark.parametrize("form", ToolFormat)
def test_strict_functions_bind_the_calls_of_a_free_answer(
    vocabulary: Vocabulary, tokenizer: Tokenizer, form: ToolFormat
) -> None:
    tools, call = tools_of(CITY | {"strict": True}, required=False), WRITTEN[form]
    before = "Sure. " if form.is_marked else ""

    assert follows(vocabulary, tokenizer, tools, form, "Rome is nice.")
    assert follows(vocabulary, tokenizer, tools, form, before + call)
    assert not follows(vocabulary, tokenizer, tools, form, call.replace("city", "town"))


def test_a_free_answer_has_no_grammar() -> None:
    assert call_grammar(tools_of(CITY, required=False), ToolFormat.HERMES, {}) is None


def test_strict_functions_need_markers_of_one_token() -> None:
    tools = tools_of(CITY | {"strict": True}, required=False)

    with pytest.raises(WrongField, match="`strict` requires"):
        call_grammar(tools, ToolFormat.HERMES, {})


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>", ToolFormat.HERMES),
        ("<tool_call><function=f>", ToolFormat.XML),
        ("[TOOL_CALLS]", ToolFormat.MISTRAL),
        ("[TOOL_CALLS][ARGS]", ToolFormat.ARGS),
        ("<|python_tag|>", ToolFormat.LLAMA),
        ("", ToolFormat.JSON),
    ],
)
def test_the_format_is_that_of_the_template(template: str, form: ToolFormat) -> None:
    assert ToolFormat.of(template) == form


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ("[]", "1 to 128 functions"),
        ("{}", "1 to 128 functions"),
        (json.dumps([PLAIN] * (MAX_TOOLS + 1)), "1 to 128 functions"),
        ("[3]", "not a function"),
        ('[{"name": "a b"}]', "letters, digits"),
        ('[{"name": "f", "parameters": [1]}]', "not a JSON schema"),
        (json.dumps([PLAIN, PLAIN]), "one name"),
        ("[", "Invalid JSON"),
        ("9" * 70_000, "70000 bytes"),
    ],
)
def test_malformed_functions_are_refused(functions: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Function.all_of(Tools(functions))


def test_functions_are_told_to_models_whose_template_takes_none() -> None:
    assert '{"name": "g_2"}' in instructions(Function.all_of(tools_of(PLAIN)))
