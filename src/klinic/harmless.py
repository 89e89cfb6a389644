"""Text that is not ours, made fit for a terminal: what it would obey is shown as what it is."""

import unicodedata

MOST_MARKS = 4  # on one letter; languages need two or three, and a pile covers the lines around it


def harmless(text: str, *, keep: str = "") -> str:
    r"""Return text that a terminal only prints, with some characters kept as they are.

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
