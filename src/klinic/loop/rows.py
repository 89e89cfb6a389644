"""Rows: read from files, folders or a hub, mapped by the user's function, checked one by one."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from klinic.errors import DataError
from klinic.loop.reading import Row, read, shown
from klinic.recipe.function import find_function

PROMPT = "prompt"
ROLES_THAT_END = "system, user or tool"


def read_rows(path: str, *, map_with: str | None = None) -> list[Row]:
    """Return the rows that `data.path` names, each with a prompt."""
    rows = read(path)
    if map_with is None:
        return checked(rows, path)
    function = find_function(map_with, example="my_data.py:row")
    mapped = ((number, _mapped(row, function, f"{path}, row {number}")) for number, row in rows)
    return checked(((number, row) for number, row in mapped if row is not None), path)


def checked(rows: Iterable[tuple[int, Any]], source: str) -> list[Row]:
    """Return the rows, refusing the first that cannot be a prompt."""
    found = []
    for number, row in rows:
        _check(row, f"{source}, row {number}")
        found.append(row)
    if not found:
        raise DataError(f"{source} has no rows: there is nothing to train on.")
    return found


def _mapped(row: Any, function: Callable[[Any], Any], where: str) -> Any:
    """Return what the user's function makes of a row; None leaves it out."""
    try:
        return function(dict(row) if isinstance(row, Mapping) else row)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise DataError(
            f"{where}: data.map failed on {shown(row)}: {type(error).__name__}: {error}. Return a "
            "row with a `prompt`, or None to leave it out."
        ) from error


def _check(row: Any, where: str) -> None:
    if not isinstance(row, Mapping):
        raise DataError(f'{where} is {shown(row)}, not a mapping. Write {{"prompt": "..."}}.')
    strange = [key for key in row if not isinstance(key, str)]
    if strange:
        raise DataError(
            f"{where} has a column named {strange[0]!r}, which is no text: in a CSV file, a row "
            "with more fields than the header. Mend the row."
        )
    if PROMPT not in row:
        raise DataError(_without_prompt(row, where))
    prompt = row[PROMPT]
    if isinstance(prompt, list | tuple):
        _check_chat(prompt, where)
    elif not isinstance(prompt, str) or not prompt:
        raise DataError(
            f"{where}: `prompt` is {shown(prompt)}. It must be text of at least one character, or "
            "a list of messages."
        )
    else:
        _check_unicode(prompt, f"{where}: `prompt`")


def _without_prompt(row: Row, where: str) -> str:
    close = get_close_matches(PROMPT, [str(key) for key in row], n=1, cutoff=0.5)
    has = ", ".join(repr(str(key)) for key in row) or "no columns"
    mend = "Rename the column that is the prompt, or make one with data.map."
    if close:
        mend = f"Rename {close[0]!r} to it."
    elif "messages" in row:
        mend = "With data.map, return the messages before the last answer as `prompt`."
    return f"{where} has no `prompt` (it has {has}). {mend}"


def _check_chat(messages: Any, where: str) -> None:
    """Refuse messages that no template could turn into a prompt."""
    if not messages:
        raise DataError(f"{where}: `prompt` is a chat without messages. Write at least one.")
    for number, message in enumerate(messages, 1):
        place = f"{where}: message {number} of `prompt`"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{place} is {shown(message)}. A message has a `role` and a `content`: "
                '{"role": "user", "content": "..."}.'
            )
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, str):
            raise DataError(f"{place} has the content {shown(content)}. It must be text.")
        _check_unicode(content, place)
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message of `prompt` is the assistant's, so there is nothing to "
            f"answer. End with {ROLES_THAT_END}; a known answer goes into a column of its own."
        )


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} is not valid Unicode ({error.reason}).") from error
