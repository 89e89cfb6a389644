"""The tables of `reference/python.md`: arguments, attributes and methods, from the source.

The source is read and not imported: most of it needs torch, and these tables do not.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import klinic
import klinic.rewards
from klinic.recipe.section import Section
from klinic.recipe.trl_tables import UNAVAILABLE, UNUSED
from klinic.training.callbacks import EVENTS, INSTEAD

ROOT = Path(klinic.__file__).parents[1]
Rows = Iterator[tuple[str, ...]]
Function = ast.FunctionDef | ast.AsyncFunctionDef
WORDS_OF_CODE = re.compile(r"\b(on_[a-z_]+|state\.epoch|grad_norm)")
ARGUMENT = re.compile(r"^    (\w+): ", re.MULTILINE)


def find_definition(module: str, name: str) -> Any:
    """Return the syntax tree of a function or class."""
    path = (ROOT / module.replace(".", "/")).with_suffix(".py")
    tree = ast.parse(path.read_text())
    return next(node for node in tree.body if getattr(node, "name", None) == name)


def public(name: str) -> Any:
    """Return the syntax tree of a public name of klinic."""
    return find_definition(klinic.LAZY[name], name)


def docstring(node: Any) -> str:
    """Return a docstring without indentation."""
    return inspect.cleandoc(ast.get_docstring(node) or "")


def one_line(text: str) -> str:
    """Return text with its lines joined."""
    return " ".join(text.split())


def section_text(text: str, title: str) -> str:
    """Return a section of a docstring, such as `Args`; empty if it has none."""
    found = re.search(rf"^{title}:\n(.*?)(?=^\w+:\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def introduction(name: str) -> str:
    """Return what a docstring says before its sections and examples, as paragraphs."""
    text = re.split(r"^(?:\w+:\n|>>>)", docstring(public(name)), maxsplit=1, flags=re.MULTILINE)[0]
    return "\n\n".join(one_line(part) for part in text.strip().split("\n\n"))


def returns(name: str) -> str:
    """Return what a docstring says about the result."""
    return one_line(section_text(docstring(public(name)), "Returns"))


def arguments(name: str) -> Rows:
    """Yield the arguments of a function with default and meaning, in the order of its signature."""
    node = public(name)
    described = re.split(ARGUMENT, section_text(docstring(node), "Args"))
    meanings = dict(zip(described[1::2], map(one_line, described[2::2]), strict=True))
    defaults = defaults_of(node)
    missing = defaults.keys() ^ meanings.keys()
    if missing:
        raise ValueError(f"{name}: the docstring and the signature differ in {sorted(missing)}")
    for argument, default in defaults.items():
        yield f"`{argument}`", default, meanings[argument]


def defaults_of(node: Function) -> dict[str, str]:
    """Return the default of every argument as a table shows it."""
    plain = [argument.arg for argument in node.args.args]
    values: list[Any] = [None] * (len(plain) - len(node.args.defaults)) + node.args.defaults
    defaults = dict(zip(plain, values, strict=True))
    keywords = [argument.arg for argument in node.args.kwonlyargs]
    defaults |= dict(zip(keywords, node.args.kw_defaults, strict=True))
    shown = {name: shown_default(value) for name, value in defaults.items()}
    return shown | ({node.args.kwarg.arg: ""} if node.args.kwarg else {})


def shown_default(value: Any) -> str:
    """Return a default in Markdown; an argument without one is required."""
    if value is None:
        return "required"
    text = ast.unparse(value)
    return text if text == "None" else f"`{text}`"


def members(node: ast.ClassDef) -> Rows:
    """Yield the public attributes and methods of a class with their docstrings."""
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            text = after.value.value if is_string(after) else ""
            yield f"`{item.target.id}`", one_line(text)
        elif isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            yield f"`{item.name}{call_marks(item)}`", one_line(docstring(item))


def is_string(node: Any) -> bool:
    """Whether a statement is a string, as the docstring of a field is."""
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def call_marks(node: Function) -> str:
    """Return the brackets of a method with its arguments; nothing for a property."""
    if node.decorator_list:
        return ""
    names = [argument.arg for argument in node.args.args[1:]]
    names += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    return f"({', '.join(names)})"


def keys(kind: type[Section]) -> Rows:
    """Yield the keys of a section with default and meaning."""
    for name, field in kind.model_fields.items():
        default = "null" if field.default is None else field.default
        yield f"`{name}`", f"`{default}`", one_line(field.description or "")


def reward_tools() -> Rows:
    """Yield the public names of `klinic.rewards`."""
    for name in klinic.rewards.__all__:
        node = find_definition(f"klinic.rewards.{klinic.rewards.HOMES[name]}", name)
        yield f"`{name}`", one_line(docstring(node).partition("\n\n")[0])


def unused() -> Rows:
    """Yield arguments of TRL without effect, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in UNUSED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    for reason, names in by_reason.items():
        yield ", ".join(sorted(names)), reason


def unavailable() -> Rows:
    """Yield refused arguments of TRL with the reason or what to do."""
    for name, reason in sorted(UNAVAILABLE.items()):
        yield f"`{name}`", reason


def events() -> Rows:
    """Yield the events of a `TrainerCallback`, with one to use where an event is not called."""
    yield from ((f"`{name}`", "called") for name in EVENTS)
    for name, instead in INSTEAD.items():
        yield f"`{name}`", "refused; use " + WORDS_OF_CODE.sub(r"`\1`", instead)
