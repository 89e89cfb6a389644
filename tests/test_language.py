"""Limits on the language of the source: words of prose, function names, local names, sizes.

The rule and the glossary are in CONTRIBUTING.md. Each limit is a rate over the whole of
`src/klinic`, so one good exception passes and a habit does not.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "klinic"
PAGES = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "log.md"]

SPEECH = re.compile(
    r"\b(tells?|told|asks?|asked|says?|said|hears?|heard"
    r"|somebody|nobody|anybody|everybody|whoever|beside)\b",
    re.IGNORECASE,
)
FREE_WHAT = re.compile(
    r"\bwhat (is|are|was|were|it|they|he|one|has|had|have|a|the|no|each|all"
    r"|came|comes|can|cannot|may|would|somebody)\b",
    re.IGNORECASE,
)
WORD = re.compile(r"[A-Za-z']+")
CODE_IN_PAGE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)

VAGUE = frozenset(
    [
        "found",
        "known",
        "how",
        "said",
        "told",
        "given",
        "heard",
        "asked",
        "apart",
        "drawn",
        "kept",
        "held",
        "seen",
        "more",
        "others",
        "place",
        "places",
    ]
)
IRREGULAR_PARTICIPLES = frozenset(
    [
        "told",
        "said",
        "heard",
        "held",
        "kept",
        "drawn",
        "seen",
        "found",
        "given",
        "taken",
        "made",
        "sent",
        "cut",
        "left",
        "lost",
        "put",
        "read",
        "run",
        "shown",
        "known",
        "split",
        "chosen",
        "written",
        "begun",
        "built",
        "caught",
        "taught",
    ]
)
ENDS_IN_ED = frozenset(["seed", "need", "feed", "speed", "embed"])

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Names:
    """Counts of function names, and of parameters and assigned names."""

    functions: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)


def is_participle(function: str) -> bool:
    """Whether a function's name is one past participle, such as `gathered`."""
    word = function.strip("_")
    if "_" in word:
        return False
    regular = word.endswith("ed") and len(word) > 3 and word not in ENDS_IN_ED
    return regular or word in IRREGULAR_PARTICIPLES


def prose(text: str) -> Iterator[str]:
    """Yield the docstrings and comments of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def names(tree: ast.AST) -> Names:
    """Return the function, parameter and variable names of a module; dunder names are left out."""
    counted = Names()
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and not node.name.startswith("__"):
            counted.functions.append(node.name)
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            counted.variables += [a.arg for a in arguments if a.arg not in ("self", "cls")]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counted.variables.append(node.id)
    return counted


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function below its docstring."""
    first = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
    return function.end_lineno - first.lineno + 1


@cache
def modules() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


@cache
def all_names() -> Names:
    total = Names()
    for text in modules().values():
        of_module = names(ast.parse(text))
        total.functions += of_module.functions
        total.variables += of_module.variables
    return total


def per_1000_words(pattern: re.Pattern[str], texts: list[str]) -> float:
    words = sum(len(WORD.findall(text)) for text in texts)
    return 1000 * sum(len(pattern.findall(text)) for text in texts) / words


@pytest.mark.parametrize(("pattern", "limit"), [(SPEECH, 0.5), (FREE_WHAT, 1.0)])
def test_prose_of_the_source(pattern, limit):
    texts = [piece for text in modules().values() for piece in prose(text)]
    assert per_1000_words(pattern, texts) <= limit


@pytest.mark.parametrize(("pattern", "limit"), [(SPEECH, 1.5), (FREE_WHAT, 1.5)])
def test_prose_of_the_pages(pattern, limit):
    texts = [CODE_IN_PAGE.sub(" ", page.read_text()) for page in PAGES]
    assert per_1000_words(pattern, texts) <= limit


def test_one_word_function_names():
    functions = all_names().functions
    one_word = [name for name in functions if "_" not in name.strip("_")]
    assert len(one_word) / len(functions) <= 0.35


def test_participles_as_function_names():
    functions = all_names().functions
    participles = [name for name in functions if is_participle(name)]
    assert len(participles) / len(functions) <= 0.015, participles


def test_vague_names_of_variables():
    variables = all_names().variables
    vague = [name for name in variables if name in VAGUE]
    assert len(vague) / len(variables) <= 0.005, vague


@pytest.mark.parametrize("path", modules())
def test_sizes_of_files_and_functions(path):
    text = modules()[path]
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS):
            assert body_lines(node) <= 50, node.name


@pytest.mark.parametrize(
    ("function", "expected"),
    [("gathered", True), ("_told", True), ("is_gathered", False), ("seed", False), ("run", True)],
)
def test_is_participle(function, expected):
    assert is_participle(function) is expected


def test_measures_find_the_dialect():
    module = '"""Tell somebody what is kept."""\n\ndef told(how):\n    found = how\n'
    assert per_1000_words(SPEECH, list(prose(module))) == pytest.approx(2000 / 5)
    assert per_1000_words(FREE_WHAT, list(prose(module))) == pytest.approx(1000 / 5)
    assert names(ast.parse(module)) == Names(["told"], ["how", "found"])
