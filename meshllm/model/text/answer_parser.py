"""Splits the text of an answer into reasoning, content and tool calls."""

from meshllm.model.text.reasoning import ReasoningParser
from meshllm.model.text.tool_parser import ToolParser
from meshllm.request import Piece


class AnswerParser:
    """The parsers of one answer; without any, all text is content."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        """Begin an answer."""
        self._reasoning = reasoning
        self._tools = tools
        self.reasoning_tokens = 0
        """Tokens of reasoning, its end included."""

    def push(self, text: str, *, is_token: bool = True) -> Piece:
        """Append the text of a token, often none; return what is now certain."""
        if self._reasoning is None:
            return self._without_reasoning(Piece(text))
        inside = self._reasoning.is_inside
        piece = self._reasoning.push(text)
        if is_token and (inside or self._reasoning.is_inside):
            self.reasoning_tokens += 1
        return self._without_reasoning(piece)

    def finish(self, text: str) -> Piece:
        """Append the last text, which was held back; return all that is left."""
        first = self.push(text, is_token=False)
        rest = self._reasoning.finish() if self._reasoning else Piece("")
        second = self._without_reasoning(rest)
        third = self._tools.finish() if self._tools else Piece("")
        pieces = (first, second, third)
        return Piece(
            "".join(each.text for each in pieces),
            reasoning="".join(each.reasoning for each in pieces),
            calls=tuple(call for each in pieces for call in each.calls),
        )

    def _without_reasoning(self, piece: Piece) -> Piece:
        if self._tools is None:
            return piece
        found = self._tools.push(piece.text)
        return Piece(found.text, reasoning=piece.reasoning, calls=found.calls)
