"""Maps rows with the user's function and validates each one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

from klinic.errors import DataError, first_line, text_of
from klinic.loop.reading import Row, read, shown
from klinic.recipe.function import find_function
from klinic.user_code import guard

PROMPT = "prompt"
ROLES_THAT_END = "system, user or tool"
MOST_NAMED, LONGEST_NAME = 50, 100  # columns in a message, and characters of a name


def read_rows(path: str, *, map_with: str | None = None) -> list[Row]:
    """Return the rows of `data.path`, each with a prompt."""
    rows = read(path)
    if map_with is None:
        return checked(rows, path)
    function = find_function(map_with, example="my_data.py:row")
    mapped = ((number, _mapped(row, function, f"{path}, row {number}")) for number, row in rows)
    with guard(f"data.map ({map_with})"):
        return checked(((number, row) for number, row in mapped if row is not None), path)


def from_python(rows: Any, source: str) -> list[Row]:
    """Return the rows of a list, a `datasets.Dataset` or any other iterable of mappings."""
    if isinstance(rows, Mapping) or hasattr(rows, "iterrows") or not isinstance(rows, Iterable):
        raise DataError(
            f"{source} is a {type(rows).__name__}, not rows. Pass a list of mappings or a "
            "datasets.Dataset; of a DataFrame, frame.to_dict('records'); of a DatasetDict, one "
            "split."
        )
    return checked(_numbered(rows, source), source)


def _numbered(rows: Iterable[Any], source: str) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield number, row
    except Exception as error:  # the user's iterable may raise any error
        raise DataError(
            f"{source}, row {number + 1} cannot be read: {type(error).__name__}: "
            f"{first_line(error)}."
        ) from error


def checked(rows: Iterable[tuple[int, Any]], source: str) -> list[Row]:
    """Return the rows; refuse the first invalid one."""
    found = []
    for number, row in rows:
        try:
            _check(row)
        except DataError as error:
            raise DataError(f"{source}, row {number}{error}") from error
        found.append(row)
    if not found:
        raise DataError(f"{source} has no rows: there is nothing to train on.")
    return found


def _mapped(row: Any, function: Callable[[Any], Any], where: str) -> Any:
    """Return the result of the user's function for a row; None drops the row."""
    try:
        return function(dict(row) if isinstance(row, Mapping) else row)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise any error
        raise DataError(
            f"{where}: data.map failed on {shown(row)}: {type(error).__name__}: "
            f"{text_of(error)}. Return a row with a `prompt`, or None to drop the row."
        ) from error


def _check(row: Any) -> None:
    """Refuse an invalid row with a message that continues `source, row 3`."""
    if type(row) is not dict and not isinstance(row, Mapping):  # the type check is fast
        raise DataError(f' is {shown(row)}, not a mapping. Write {{"prompt": "..."}}.')
    _check_columns(row)
    if PROMPT not in row:
        raise DataError(_without_prompt(row))
    prompt = row[PROMPT]
    if isinstance(prompt, (list, tuple)):
        _check_chat(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise DataError(
            f": `prompt` is {shown(prompt)}. It must be text of at least one character, or "
            "a list of messages."
        )


def _check_columns(row: Mapping[Any, Any]) -> None:
    for name, value in row.items():
        if not isinstance(name, str):
            raise DataError(
                f" has a column named {shown(name)}, which is not text. Name columns with text."
            )
        # ASCII text, the common case, needs no check
        if not name.isascii():
            _check_unicode(name, f": the name of column {name!r}")
        if isinstance(value, str) and not value.isascii():
            _check_unicode(value, f": `{name}`")


def _without_prompt(row: Row) -> str:
    names = [str(key)[:LONGEST_NAME] for key in islice(row, MOST_NAMED)]
    close = get_close_matches(PROMPT, names, n=1, cutoff=0.5)
    has = ", ".join(map(repr, names)) or "no columns"
    mend = "Rename the column that is the prompt, or make one with data.map."
    if close:
        mend = f"Rename {close[0]!r} to it."
    elif "messages" in row:
        mend = "With data.map, return the messages before the last answer as `prompt`."
    return f" has no `prompt` (it has {has}). {mend}"


def _check_chat(messages: Any) -> None:
    """Refuse messages that no chat template can render as a prompt."""
    if not messages:
        raise DataError(": `prompt` is a chat without messages. Write at least one.")
    for number, message in enumerate(messages, 1):
        place = f": message {number} of `prompt`"
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
            ": the last message of `prompt` is the assistant's, so there is nothing to "
            f"complete. End with {ROLES_THAT_END}; put a reference answer in its own column."
        )


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} is not valid Unicode ({error.reason}).") from error
