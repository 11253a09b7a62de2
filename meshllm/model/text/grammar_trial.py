"""Compile a grammar and end: ``python grammar_trial.py json|lark SECONDS``, with it on stdin.

Nothing interrupts the compiler of llguidance, and some short schemas take it minutes. Here the
system ends it, so that one that comes to its end can be compiled where it is used. What is wrong
with a grammar is reported there. A script that imports no more than it needs: a tenth of a second.
"""

import os
import resource
import sys
from contextlib import suppress

CPU_S = 2  # s, at most; schemas of 64 KiB take half of one
BEGUN_CPU_S = 10  # s, for an answer that has begun: a faster machine has compiled it before
MEMORY_BYTES = 2 << 30
WHITE_SPACE = r" ?|\n {0,16}"  # endless white space would be valid JSON
TOKEN = 1
"""A token of this vocabulary, all bytes, that stands for any marker."""


def main(kind: str, cpu_s: int) -> None:
    """Compile the grammar within the limits of this process."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU comes at the first
    for limit, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # macOS limits no address space
            resource.setrlimit(limit, (most, most))
    from llguidance import LLMatcher, LLTokenizer

    grammar = sys.stdin.buffer.read().decode()
    with suppress(
        BaseException
    ):  # panics of Rust included: it ends, and is reported where it is used
        if kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(
                grammar, overrides={"whitespace_pattern": WHITE_SPACE}
            )
        LLMatcher(LLTokenizer("byte"), grammar, log_level=0).compute_bitmask()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
