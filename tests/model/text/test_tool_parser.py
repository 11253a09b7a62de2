"""Tool calls in the text of answers, in each format and split anywhere."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.model.text.tool_format import ToolFormat
from meshllm.model.text.tool_parser import ToolParser
from meshllm.request import Answer, FinishReason, Written

NAMES: dict[str, dict[str, Any]] = {
    "f": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}, "y": {}}},
    "g_2": {
        "properties": {
            "text": {"type": ["string", "null"]},
            "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "either": {"oneOf": [{"type": "string"}, {"type": ["number", "array"]}]},
            "flag": {"type": "boolean"},
            "gone": {"type": ["number", "null"]},
            "strange": {"type": [{}, 3], "anyOf": 4},
        }
    },
}
HERMES, XML, MISTRAL = ToolFormat.HERMES, ToolFormat.XML, ToolFormat.MISTRAL
ARGS, LLAMA, JSON = ToolFormat.ARGS, ToolFormat.LLAMA, ToolFormat.JSON
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "f", "g_2", "{", "}", "[", "]", '"',
    "name", "arguments", ":", ",", " ", "\n", '{"name": "f", "arguments": {', '"x": 1',
    "<function=", "f>", "</function>", "x", "\\", "<",
]  # fmt: skip


def parsed(form: ToolFormat, parts: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return content and calls of an answer that arrives in these parts."""
    parser, written = ToolParser(form, NAMES), Written()
    for part in parts:
        written.add(parser.push(part))
    written.add(parser.finish())
    answer = written.complete(Answer("", (), 0, FinishReason.STOP, 0.0, 0.0, 0.0, 0.0, ()))
    return answer.text, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (
            HERMES,
            'Sure.\n<tool_call>\n{"name": "f", "arguments": {"s": "</tool_call>}"}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {"x": 1}, "name": "g_2"}\n</tool_call>',
            "Sure.",
            [("f", '{"s": "</tool_call>}"}'), ("g_2", '{"x": 1}')],
        ),
        (
            XML,
            "Now\n\n<tool_call>\n<function=f>\n<parameter=x>\n12\n</parameter>\n<parameter=s>\n12\n"
            "</parameter>\n<parameter=y>\na\nb\n</parameter>\n</function>\n</tool_call>",
            "Now",
            [("f", '{"x": 12, "s": "12", "y": "a\\nb"}')],
        ),
        (
            XML,
            "<tool_call><function=f><parameter=x>many</parameter></function></tool_call>",
            "",
            [("f", '{"x": "many"}')],
        ),
        (
            XML,
            "<tool_call><function=g_2><parameter=text>5</parameter><parameter=count>5</parameter>"
            "<parameter=either>[5]</parameter><parameter=strange>5</parameter></function>"
            "</tool_call>",
            "",
            [("g_2", '{"text": "5", "count": 5, "either": "[5]", "strange": "5"}')],
        ),
        (
            XML,
            "<tool_call><function=g_2><parameter=flag>\nTrue\n</parameter><parameter=gone>None"
            "</parameter><parameter=count>1e999</parameter><parameter=text>False</parameter>"
            "</function></tool_call>",
            "",
            [("g_2", '{"flag": true, "gone": null, "count": "1e999", "text": "False"}')],
        ),
        (
            HERMES,
            '<tool_call>{"arguments": {"x": NaN}, "name": "f"}</tool_call>',
            '<tool_call>{"arguments": {"x": NaN}, "name": "f"}</tool_call>',
            [],
        ),
        (
            HERMES,
            '<tool_call>{"arguments": {"s": "\\ud83d", "x": "\u00e9"}, "name": "f"}</tool_call>',
            "",
            [("f", '{"s": "\\ud83d", "x": "\\u00e9"}')],
        ),
        (
            XML,
            "<tool_call><function=f>x<parameter=s>a<parameter=y>b</parameter></parameter></function>"
            "</tool_call>",
            "",
            [("f", '{"s": "a<parameter=y>b"}')],
        ),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "a]}"}, '
            '{"name": "g_2", "arguments": {}}]',
            "",
            [("f", '{"x": 1}'), ("g_2", "{}")],
        ),
        (
            ARGS,
            'On it. [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g_2[ARGS]{}',
            "On it.",
            [("f", '{"x": 1}'), ("g_2", "{}")],
        ),
        (LLAMA, '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
        (
            LLAMA,
            '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}; '
            '{"name": "g_2", "parameters": {}}',
            "",
            [("f", '{"x": 1}'), ("g_2", "{}")],
        ),
        (JSON, ' [{"name": "f", "arguments": {}}]\n', "", [("f", "{}")]),
        (JSON, '{"function": {"name": "f", "arguments": "{}"}}', "", [("f", "{}")]),
    ],
)
def test_calls_are_found_however_the_text_is_split(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parsed(form, [text]) == parsed(form, list(text)) == (content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "a < b, <tool_cal x"),
        (HERMES, '<tool_call>{"name": "h", "arguments": {}}</tool_call> or not'),
        (HERMES, "<tool_call>f\n<arg_key>x</arg_key></tool_call>"),
        (HERMES, "<tool_call>\n"),
        (XML, "<tool_call><function=h></function></tool_call>"),
        (XML, "<tool_call><function=f>"),
        (ARGS, '[TOOL_CALLS]h[ARGS]{"x": 1}'),
        (ARGS, "[TOOL_CALLS]f now"),
        (JSON, '{"answer": 3}'),
        (JSON, '{"name": 3}'),
        (JSON, '{"name": "f", "arguments": 3}'),
        (JSON, '{"name": nothing}'),
        (JSON, '{"name": "h", "arguments": {}}'),
        (JSON, "[1, 2] is a list"),
        (JSON, 'Use {"name": "f", "arguments": {}}'),
        (JSON, " " * 300 + "{}"),
    ],
)
def test_what_is_not_a_call_is_content(form: ToolFormat, text: str) -> None:
    assert parsed(form, [text]) == parsed(form, list(text)) == (text, [])


@given(st.sampled_from(ToolFormat), st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.data())
def test_no_text_is_lost(form: ToolFormat, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    content, calls = parsed(form, parts)

    assert (content, calls) == parsed(form, [text])
    assert calls or content == text


def test_arguments_stream_as_they_are_written() -> None:
    parser = ToolParser(HERMES, NAMES)
    parser.push('<tool_call>{"name": "f", "arguments": ')

    first, second = parser.push('{"x": '), parser.push("1}}")

    assert [(each.name, each.arguments) for each in first.calls] == [("f", '{"x": ')]
    assert [(each.name, each.arguments) for each in second.calls] == [("", "1}")]


def test_a_call_that_is_cut_off_keeps_what_was_written() -> None:
    assert parsed(HERMES, ['<tool_call>{"name": "f", "arguments": {"x": ']) == (
        "",
        [("f", '{"x": ')],
    )


def test_content_that_cannot_be_a_call_streams() -> None:
    assert ToolParser(JSON, NAMES).push('{"answer": ').text == '{"answer": '
    assert ToolParser(HERMES, NAMES).push("Hello there.").text == "Hello there."
