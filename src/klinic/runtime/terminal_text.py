"""Escape control characters in untrusted text before printing it to a terminal."""

import unicodedata

MAX_COMBINING_MARKS = (
    4  # per letter; languages need two or three, a longer stack overlaps other lines
)


def escape_for_terminal(text: str, *, keep: str = "") -> str:
    r"""Return the text with non-printable characters escaped, except those in `keep`.

    >>> escape_for_terminal("a\x1b[2J\u202eb\n"), escape_for_terminal("a\n", keep="\n")
    ('a\\x1b[2J\\u202eb\\n', 'a\n')
    """
    if text.isascii() and text.isprintable():
        return text
    pieces, num_marks = [], 0
    for c in text:
        num_marks = num_marks + 1 if unicodedata.combining(c) else 0
        is_safe = (c.isprintable() and num_marks <= MAX_COMBINING_MARKS) or c in keep
        pieces.append(c if is_safe else c.encode("unicode_escape").decode())
    return "".join(pieces)
