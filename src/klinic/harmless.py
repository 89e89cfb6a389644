"""Text that is not ours, made fit for a terminal: what it would obey is shown as what it is."""


def harmless(text: str, *, keep: str = "") -> str:
    r"""Return text that a terminal only prints, with some characters kept as they are.

    >>> harmless("a\x1b[2J\u202eb\n"), harmless("a\n", keep="\n")
    ('a\\x1b[2J\\u202eb\\n', 'a\n')
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
