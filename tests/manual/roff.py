"""Converts text and Markdown to roff for man pages."""

import re
from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

_HEADINGS = {"h2": ".SH", "h3": ".SS"}
_FONTS = {"code_inline": "B", "strong": "B", "em": "I"}


def escape(text: str) -> str:
    """Escape groff syntax: backslashes, and dots and quotes that begin a line."""
    return _guard(_escape(text))


def page(markdown: str, section: str) -> str:
    """Convert a page whose first heading is ``name: summary``.

    Raises:
        ValueError: a block that is not a heading, paragraph, flat list, code block or table.
    """
    heading, _, body = markdown.partition("\n")
    name, _, summary = heading.removeprefix("# ").partition(": ")
    tree = SyntaxTreeNode(MarkdownIt("commonmark").enable("table").parse(body))
    title = f'.TH "{name.upper()}" "{section}" "" "meshllm" "meshllm manual"'
    top = f".SH NAME\n{escape(name)} \\- {escape(summary)}"
    return "\n".join([title, top, *_blocks(tree)]) + "\n"


def _blocks(tree: SyntaxTreeNode) -> Iterator[str]:
    for node in tree.children:
        match node.type:
            case "heading":
                yield f"{_HEADINGS[node.tag]} {_inline(node)}"
            case "paragraph":
                yield f".PP\n{_guard(_inline(node))}"
            case "bullet_list":
                yield from (f".IP \\(bu 2\n{_guard(_inline(item))}" for item in node.children)
            case "fence":
                yield _literal(node.content.rstrip("\n"))
            case "table":
                rows = [row for part in node.children for row in part.children]
                yield _literal(_table([[_plain(cell) for cell in row.children] for row in rows]))
            case other:
                raise ValueError(f"Cannot convert a {other} to roff")


def _literal(text: str) -> str:
    return f".PP\n.RS 2\n.nf\n{escape(text)}\n.fi\n.RE"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _plain(node: SyntaxTreeNode) -> str:
    return "".join(each.content for each in node.walk() if each.type in ("text", "code_inline"))


def _inline(node: SyntaxTreeNode) -> str:
    if node.type == "softbreak":
        return "\n"
    leaf = _escape(node.content) if node.type in ("text", "code_inline") else ""
    text = leaf + "".join(map(_inline, node.children))
    font = _FONTS.get(node.type)
    return f"\\f{font}{text}\\fR" if font else text


def _escape(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\`")


def _guard(text: str) -> str:
    """Escape lines that begin like a roff request, except a line `.PP`."""
    return re.sub(r"(?m)^(?=['.])(?!\.PP$)", r"\\&", text)
