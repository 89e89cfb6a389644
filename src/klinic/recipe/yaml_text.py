"""The YAML subset of recipes: plain values, unique keys, no tags, no anchors, bounded depth.

Unlike in YAML 1.1, `1e-6` is a number, and a date, `0x10` and `1:30` are text.
"""

import re
from typing import Any

import yaml

from klinic.errors import ConfigError

MAX_DEPTH = 20  # recipes use three levels; the parser recurses once per level
MAX_VALUES = 2_000  # a recipe that sets every key has 150, keys included

_PATTERNS = {
    "bool": r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
    "null": r"~|null|Null|NULL|",
    "int": r"[-+]?(?:0|[1-9][0-9_]*)",
    # a float has a dot or an exponent
    "float": r"(?=.*[.eE])[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses tags, anchors, duplicate keys and deep nesting."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - declared so in PyYAML
    depth = 0
    num_values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _syntax_error(event, "anchors (&) and aliases (*) are not used in recipes")
        if getattr(event, "tag", None) is not None:
            raise _syntax_error(event, "tags (!) are not used in recipes")
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise _syntax_error(event, f"there are more than {MAX_VALUES:,} keys and values")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _syntax_error(event, f"values are nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: ARG002
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _syntax_error(key_node, "a key is a list or a section")
            if key_node.value in mapping:
                raise _syntax_error(key_node, f"{key_node.value!r} is set twice, keep one")
            mapping[key_node.value] = self.construct_object(value_node, deep=True)
        return mapping


class _Dumper(yaml.SafeDumper):
    """A safe dumper that quotes text which `_Loader` would parse as a number."""


for _kind, _pattern in _PATTERNS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), None
        )


def parse_yaml(text: str, *, where: str) -> Any:
    """Parse YAML text to plain values.

    >>> parse_yaml("{kl_beta: 1e-2, day: 2024-01-01}", where="here")
    {'kl_beta': 0.01, 'day': '2024-01-01'}
    """
    try:
        reader = _Loader(text)
        return reader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        reason = error.problem or error.context
        raise ConfigError(f"{where}{line}: this is not valid recipe YAML: {reason}.") from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{where}: this is not text: YAML does not allow the character at position "
            f"{error.position}. Save the file as plain UTF-8."
        ) from error
    except ValueError as error:  # Python's limit on the digits of an integer
        raise ConfigError(f"{where}: an integer has too many digits.") from error


def dump_yaml(values: Any) -> str:
    """Dump values as YAML that `parse_yaml` reads back equal, in the same order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _syntax_error(node: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
