import pytest

from tests.manual.roff import page

TEXT = """\
# meshllm-x: what x is

Code `a-b` and **bold**
*words*.

## Part one

- first
- second
  line

### Deeper

```
$ run -it
.dot
```

| a | long heading |
|---|---|
| 1 | `2` |
"""

ROFF = """\
.TH "MESHLLM-X" "7" "" "meshllm" "meshllm manual"
.SH NAME
meshllm\\-x \\- what x is
.PP
Code \\fBa\\-b\\fR and \\fBbold\\fR
\\fIwords\\fR.
.SH Part one
.IP \\(bu 2
first
.IP \\(bu 2
second
line
.SS Deeper
.PP
.RS 2
.nf
$ run \\-it
\\&.dot
.fi
.RE
.PP
.RS 2
.nf
a  long heading
1  2
.fi
.RE
"""


def test_markdown_becomes_roff() -> None:
    assert page(TEXT, "7") == ROFF


def test_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="Cannot convert a blockquote"):
        page("# x: y\n\n> quoted\n", "7")
