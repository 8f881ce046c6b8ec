"""Read and write YAML 1.2 scalars: `1e-3` is a number, `10:13` and `no` are text; a duplicate key is refused.

PyYAML follows YAML 1.1, in which 1e-3 is text, 10:13 is 613 and no is false. Digits may have underscores between them.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from dovetail.core.errors import RecipeError

_SCALARS = (
    ("tag:yaml.org,2002:null", re.compile(r"~|null|Null|NULL|"), "~nN\0"),
    ("tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    ("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9][0-9_]*"), "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
        ),
        "-+0123456789.",
    ),
)
_RESOLVERS: dict[str, list] = {}
for _tag, _pattern, _firsts in _SCALARS:
    for _first in _firsts:
        whole = re.compile(f"(?:{_pattern.pattern})$")
        _RESOLVERS.setdefault("" if _first == "\0" else _first, []).append((_tag, whole))


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise RecipeError(f"line {line}: {key.value!r} is given twice: keep one of them", param=str(key.value))
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node).replace("_", ""))  # 010 is ten, not eight


_Loader.add_constructor("tag:yaml.org,2002:int", _int)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _RESOLVERS


def parse(text: str) -> Any:
    """Return the contents of a document; raise RecipeError with the line if it is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise RecipeError("not valid YAML: " + " ".join(str(error).split())) from error


def write(mapping: Any) -> str:
    """Return the mapping as a YAML document."""
    return yaml.dump(mapping, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def write_inline(value: Any) -> str:
    """Return a value on one line, as it may stand behind `key=`."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**9)
    return text.removesuffix("\n").removesuffix("...").strip()
