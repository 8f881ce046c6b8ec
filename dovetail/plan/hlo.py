"""Parse the text of a compiled program: its computations, their instructions, and how often each runs.

Only what plans need is read: shapes, calls, and the trip counts of loops.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_END = re.compile(r"^}(, execution_thread=.*)?$")  # a kernel's metadata may have longer lines that begin with }
_LEFT = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_NAME = re.compile(r"%([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_TRIP_COUNT = re.compile(r'known_trip_count"?\s*[:=]\s*\{"?n"?:"?(\d+)')

Shape = tuple[str, tuple[int, ...]]  # (element type, dims)


@dataclass(frozen=True)
class Instruction:
    """Hold one instruction of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of its result; several for a tuple
    rest: str  # operands and attributes, unparsed
    is_root: bool

    @property
    def bytes(self) -> float:
        """Return the bytes of the result."""
        return sum(size_of(shape) for shape in self.shapes)

    @property
    def called(self) -> list[str]:
        """Return the names of the computations that it calls."""
        lists = ",".join(_CALLED_LIST.findall(self.rest))
        return _CALLED.findall(self.rest) + [name.strip().lstrip("%") for name in lists.split(",") if name.strip()]

    @property
    def operands(self) -> list[str]:
        """Return the names of its operands."""
        return _NAME.findall(self.rest[: _end_of_type("(" + self.rest, 0) - 1])


@dataclass
class Module:
    """Hold the computations of a program by name."""

    entry: str = ""
    computations: dict[str, list[Instruction]] = field(default_factory=lambda: defaultdict(list))

    @cached_property
    def times(self) -> dict[str, int]:
        """Return how often each computation runs in a call of the program.

        Every branch of a conditional counts, and a loop with an unknown trip count runs once.
        """
        counted: dict[str, int] = defaultdict(int)
        self._count(self.entry, 1, counted, branches=None)
        return counted

    @cached_property
    def usually(self) -> dict[str, int]:
        """Return the same with only the first branch of every conditional.

        jax's first branch is the one for a false condition. Work that only some requests need is in the other.
        """
        counted: dict[str, int] = defaultdict(int)
        self._count(self.entry, 1, counted, branches=1)
        return counted

    def _count(self, name: str, times: int, counted: dict[str, int], branches: int | None) -> None:
        counted[name] += times
        for one in self.computations[name]:
            if one.opcode.endswith(("-update", "-done")):  # they repeat the calls of their -start
                continue
            body = _BODY.search(one.rest)
            for called in one.called[:branches] if one.opcode == "conditional" else one.called:
                often = trip_count(self, name, one) if body and called == body[1] else 1
                self._count(called, times * often, counted, branches)

    def instructions(self, times: dict[str, int] | None = None) -> Iterator[tuple[str, Instruction, int]]:
        """Yield (computation, instruction, how often it runs). `times`: `usually` instead of `times`."""
        for name, often in (self.times if times is None else times).items():
            for one in self.computations[name]:
                yield name, one, often

    def root(self, computation: str) -> Instruction | None:
        """Return the root of a computation."""
        return next((one for one in self.computations[computation] if one.is_root), None)

    def find(self, computation: str, name: str) -> Instruction | None:
        """Return an instruction of a computation by name."""
        return next((one for one in self.computations[computation] if one.name == name), None)


def read(text: str) -> Module:
    """Parse the text of `compiled.as_text()`."""
    module, current = Module(), ""
    for line in text.splitlines():
        if not current:
            if head := _HEAD.match(line):
                current = head[2]
                module.entry = current if head[1] else module.entry
        elif _END.match(line):
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
    """Return where a type ends: a tuple's after its closing parenthesis, any other before a space."""
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
    """Return the bytes of a shape. Elements below 8 bits are packed; a token or an opaque value has none."""
    kind, dims = shape
    bits = 8 if kind == "pred" else int((re.search(r"\d+", kind) or ["0"])[0])
    return math.prod(dims) * bits / 8


# --- loops ------------------------------------------------------------------------------------------------------------

MOVES = ("copy", "copy-start", "copy-done", "bitcast")


def trip_count(module: Module, computation: str, loop: Instruction) -> int:
    """Return how many iterations a loop has; 1 if that is not known.

    The TPU compiler does not write it down: it is read from a counter with a constant start, step and bound.
    """
    if known := _TRIP_COUNT.search(loop.rest):
        return int(known[1])
    condition, body = _CONDITION.search(loop.rest), _BODY.search(loop.rest)
    if condition is None or body is None:
        return 1
    place, bound = _counter(module, condition[1])
    start = _element(module, computation, module.find(computation, loop.operands[0]), place)
    step = _step(module, body[1], place)
    if bound is None or start is None or not step:
        return 1
    return max(0, -(-(bound - start) // step))


def _counter(module: Module, condition: str) -> tuple[int, int | None]:
    """Return (the counter's index in the loop's carry, the bound that it stays below)."""
    test = module.root(condition)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.rest:
        return 0, None
    counter, bound = (module.find(condition, name) for name in test.operands)
    index = _INDEX.search(counter.rest) if counter else None
    return (int(index[1]), _constant(module, condition, bound)) if index else (0, None)


def _step(module: Module, body: str, place: int) -> int | None:
    """Return what an iteration adds to the counter."""
    carried = module.root(body)
    added = module.find(body, carried.operands[place]) if carried and carried.opcode == "tuple" else None
    if added is None or added.opcode != "add":
        return None
    numbers = [_constant(module, body, module.find(body, name)) for name in added.operands]
    return next((number for number in numbers if number is not None), None)


def _element(module: Module, computation: str, carried: Instruction | None, place: int) -> int | None:
    if carried is None or carried.opcode != "tuple":
        return None
    return _constant(module, computation, module.find(computation, carried.operands[place]))


def _constant(module: Module, computation: str, one: Instruction | None) -> int | None:
    """Return the integer constant of an instruction, through copies and bitcasts; None if it is not constant."""
    while one is not None and one.opcode in MOVES:
        one = module.find(computation, one.operands[0])
    number = re.match(r"(-?\d+)\)", one.rest) if one and one.opcode == "constant" else None
    return int(number[1]) if number else None


# --- copies -----------------------------------------------------------------------------------------------------------

COPIES = ("copy", "copy-start", "transpose", "convert", "reverse", "gather", "slice", "dynamic-slice", "concatenate")


def copies_of(module: Module, dims: tuple[int, ...]) -> list[str]:
    """Return the instructions that copy an array with as many elements as `dims`, such as a pool of pages.

    An in-place update (a scatter, a dynamic-update-slice) has that shape too but writes only the new elements, so it
    does not count.
    """
    found = []
    fused = {called for _, one, _ in module.instructions() if one.opcode == "fusion" for called in one.called}
    for computation, one, _ in module.instructions():
        if computation in fused:  # only the root of a fusion is written to memory
            continue
        root = module.root(one.called[0]) if one.opcode == "fusion" and one.called else one
        is_copy = root is not None and root.opcode in COPIES
        if is_copy and any(math.prod(shape) == math.prod(dims) for _, shape in one.shapes[:1]):
            found.append(f"{one.name} = {one.shapes[0][0]}{list(one.shapes[0][1])} {one.opcode}")
    return found


_TARGET = re.compile(r'custom_call_target="(\w+)"')


def kernels(module: Module) -> dict[str, int]:
    """Return the number of calls of each Pallas or Triton kernel, by its name in the program."""
    found: dict[str, int] = defaultdict(int)
    for _, one, times in module.instructions():
        target = _TARGET.search(one.rest) if one.opcode == "custom-call" else None
        if target and ("tpu_custom_call" in target[1] or "triton" in target[1]):
            found[re.sub(r"(\.clone|\.\d+)+$", "", one.name)] += times
    return dict(found)
