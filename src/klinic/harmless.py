"""Escape control characters in untrusted text before printing it to a terminal."""

import unicodedata

MOST_MARKS = 4  # per letter; languages need two or three, a longer stack overlaps other lines


def harmless(text: str, *, keep: str = "") -> str:
    r"""Return the text with non-printable characters escaped, except those in `keep`.

    >>> harmless("a\x1b[2J\u202eb\n"), harmless("a\n", keep="\n")
    ('a\\x1b[2J\\u202eb\\n', 'a\n')
    """
    if text.isascii() and text.isprintable():
        return text
    shown, piled = [], 0
    for c in text:
        piled = piled + 1 if unicodedata.combining(c) else 0
        fine = (c.isprintable() and piled <= MOST_MARKS) or c in keep
        shown.append(c if fine else c.encode("unicode_escape").decode())
    return "".join(shown)
