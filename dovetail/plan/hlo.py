"""A compiled program as XLA writes it down, read back: its computations, their instructions, and how often each runs.

Only what a plan asks of it is read: shapes, who calls whom, how often a loop turns.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_LEFT = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_TURNS = re.compile(r'known_trip_count"?\s*[:=]\s*\{"?n"?:"?(\d+)')

Shape = tuple[str, tuple[int, ...]]  # an element's type, the dims


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of its result; several where that is a tuple
    rest: str  # operands and attributes, as they stand
    is_root: bool

    @property
    def bytes(self) -> float:
        return sum(size_of(shape) for shape in self.shapes)

    @property
    def called(self) -> list[str]:
        lists = ",".join(_CALLED_LIST.findall(self.rest))
        return _CALLED.findall(self.rest) + [name.strip().lstrip("%") for name in lists.split(",") if name.strip()]

    @property
    def turns(self) -> int:
        """Of a loop, where the compiler knows how many; else 1."""
        found = _TURNS.search(self.rest)
        return int(found[1]) if found else 1


@dataclass
class Module:
    entry: str = ""
    computations: dict[str, list[Instruction]] = field(default_factory=lambda: defaultdict(list))

    @cached_property
    def times(self) -> dict[str, int]:
        """How often each computation runs in a call of the program. A branch counts as taken, an unknown loop once."""
        counted: dict[str, int] = defaultdict(int)
        self._count(self.entry, 1, counted)
        return counted

    def _count(self, name: str, times: int, counted: dict[str, int]) -> None:
        counted[name] += times
        for one in self.computations[name]:
            if one.opcode.endswith(("-update", "-done")):  # they name again what their start has called
                continue
            body = _BODY.search(one.rest)
            for called in one.called:
                self._count(called, times * (one.turns if body and called == body[1] else 1), counted)

    def instructions(self) -> Iterator[tuple[str, Instruction, int]]:
        """(its computation, it, how often it runs)."""
        for name, times in self.times.items():
            for one in self.computations[name]:
                yield name, one, times

    def root(self, computation: str) -> Instruction | None:
        return next((one for one in self.computations[computation] if one.is_root), None)


def read(text: str) -> Module:
    """From what `compiled.as_text()` gives."""
    module, current = Module(), ""
    for line in text.splitlines():
        if not current:
            if head := _HEAD.match(line):
                current = head[2]
                module.entry = current if head[1] else module.entry
        elif line.startswith("}"):
            current = ""
        elif one := _instruction(line):
            module.computations[current].append(one)
    return module


def _instruction(line: str) -> Instruction | None:
    left = _LEFT.match(line)
    if left is None:
        return None
    end = _end_of_type(line, left.end())
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    shapes = tuple((kind, _dims(dims)) for kind, dims in _SHAPE.findall(line[left.end() : end]))
    return Instruction(left[2], opcode[1], shapes, line[opcode.end() :], bool(left[1]))


def _end_of_type(line: str, start: int) -> int:
    """A tuple's type ends with its parenthesis, any other before a blank."""
    if line[start] != "(":
        return line.find(" ", start)
    depth = 0
    for at in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[at], 0)
        if depth == 0:
            return at + 1
    return len(line)


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(dim.lstrip("<=")) for dim in text.split(",") if dim)


def size_of(shape: Shape) -> float:
    """Bytes. An element of fewer than 8 bits takes its share of one; a token or an opaque takes none."""
    kind, dims = shape
    bits = 8 if kind == "pred" else int((re.search(r"\d+", kind) or ["0"])[0])
    return math.prod(dims) * bits / 8


# --- copies -----------------------------------------------------------------------------------------------------------

COPIES = ("copy", "copy-start", "transpose", "convert", "reverse", "gather", "slice", "dynamic-slice", "concatenate")


def copies_of(module: Module, dims: tuple[int, ...]) -> list[str]:
    """Instructions that write anew what has this shape, as a pool of pages, or as much in another one. An update in
    place (a scatter, a dynamic-update-slice) has the shape too and writes only what is new."""
    found = []
    fused = {called for _, one, _ in module.instructions() if one.opcode == "fusion" for called in one.called}
    for computation, one, _ in module.instructions():
        if computation in fused:  # its values stay in registers, but for the root's
            continue
        root = module.root(one.called[0]) if one.opcode == "fusion" and one.called else one
        is_copy = root is not None and root.opcode in COPIES
        if is_copy and any(math.prod(shape) == math.prod(dims) for _, shape in one.shapes[:1]):
            found.append(f"{one.name} = {one.shapes[0][0]}{list(one.shapes[0][1])} {one.opcode}")
    return found


_TARGET = re.compile(r'custom_call_target="(\w+)"')


def kernels(module: Module) -> dict[str, int]:
    """Calls of each kernel of our own or of jax's (Pallas), by the name it has in the program."""
    found: dict[str, int] = defaultdict(int)
    for _, one, times in module.instructions():
        target = _TARGET.search(one.rest) if one.opcode == "custom-call" else None
        if target and ("tpu_custom_call" in target[1] or "triton" in target[1]):
            found[re.sub(r"(\.clone|\.\d+)+$", "", one.name)] += times
    return dict(found)
