"""The few shapes that steps are compiled for: a plan is padded up to the nearest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.engine.device.batch import Shape
from dovetail.engine.schedule.plan import StepPlan

STEPS = (1, 4, 16)  # decode steps a dispatch may take: each is compiled, and XLA runs a loop it knows the length of
# without asking the host after every turn
DISPATCH_SECONDS = 0.02  # how long a dispatch of several decode steps may take: a newcomer waits for one of them
SHORT = 1024  # tokens of a step that is mostly one prompt's
FEW_ROWS, FEW_TOKENS = 8, 512  # of a first request or two
LEAST_TOKENS = 32  # of a prompt's step on a CPU
LONG = 4096  # tokens of a step that takes the device so long that its padding counts


@dataclass(frozen=True)
class Buckets:
    max_rows: int
    max_tokens: int
    max_pages: int
    max_decode_steps: int | None = None  # per dispatch; None: as many as `step_seconds` allows
    step_seconds: tuple[float, float] = (0.0, 0.0)  # that a decode step takes at least, and each row more
    few_rows: tuple[int, ...] = (1, 8, 32)  # of a decode step, doubled from the last on: so few cost next to nothing,
    # but each of them on a CPU
    least_rows: int = 64  # of a prompt's step: fewer cost no less, but on a CPU
    least_tokens: int = 128  # of a prompt's step: fewer cost little more than reading the weights; not so on a CPU
    halves: bool = True  # of those steps, for the shortest and the longest; not on a CPU either
    few_hidden: bool = True  # two shapes for all steps that keep hidden states; on a CPU as many as others have
    tokens_a_row: int = 16  # of a prompt's step from which on its rows cost little beside them

    def shape_for(self, plan: StepPlan, keeps_hidden: bool = False) -> Shape:
        if plan.is_decode and not keeps_hidden:
            return self.decode(len(plan.rows), plan.steps)
        return self.mixed(plan.num_tokens, len(plan.rows), keeps_hidden)

    def decode(self, rows: int, steps: int = 1) -> Shape:
        rows = _up(rows, self._decode_rows())
        return Shape(rows, rows, self.max_pages, steps)

    def mixed(self, tokens: int, rows: int, keeps_hidden: bool = False) -> Shape:
        """Return the shape of a step with prompts."""
        if keeps_hidden and self.few_hidden:
            tokens = _up(max(tokens, self.max_rows + 1), self._hidden_tokens())
            return Shape(tokens, self.max_rows, self.max_pages, keeps_hidden=True)
        rows = _up(rows, self._mixed_rows())
        if _up(tokens, self._tokens(rows)) > self._most_tokens(rows):
            rows = self.max_rows
        return Shape(_up(tokens, self._tokens(rows)), rows, self.max_pages, keeps_hidden=keeps_hidden)

    def largest(self) -> Shape:
        return Shape(self._tokens(self.max_rows)[-1], self.max_rows, self.max_pages)

    def usual(self) -> list[Shape]:
        """Every shape that a plan takes."""
        pages = self.max_pages
        shapes = [Shape(rows, rows, pages, n) for rows in self._decode_rows() for n in self.steps_for(rows)]
        for rows in self._mixed_rows():
            own = [Shape(n, rows, pages) for n in self._tokens(rows) if n <= self._most_tokens(rows)]
            shapes += [*own, own[0].sampler]
            shapes += [replace(shape, keeps_hidden=True) for shape in own if not self.few_hidden]
        if self.few_hidden:
            shapes += [Shape(tokens, self.max_rows, pages, keeps_hidden=True) for tokens in self._hidden_tokens()]
        return sorted(shapes, key=lambda shape: -shape.tokens)  # those that take longest to compile first

    def first(self) -> list[Shape]:
        """Return the shapes that the plans of a first request or two take."""
        return [s for s in self.usual() if s.rows <= FEW_ROWS and s.tokens <= FEW_TOKENS and not s.keeps_hidden]

    def steps_for(self, rows: int) -> tuple[int, ...]:
        """How many decode steps a dispatch of so many rows may take."""
        least, each = self.step_seconds
        steps = steps_in_time(least + each * _up(rows, self._decode_rows()))
        return tuple(n for n in steps if n <= (self.max_decode_steps or n))

    def _decode_rows(self) -> list[int]:
        *few, last = self.few_rows
        return [n for n in few if n < self.max_rows] + _sizes(last, 2, self.max_rows)

    def _mixed_rows(self) -> list[int]:
        return _sizes(min(self.least_rows, self.max_rows), 8, self.max_rows)

    def _most_tokens(self, rows: int) -> int:
        """Of a step with so many rows: beside more of them, all rows that there may be cost little."""
        return max(self.max_tokens, rows + 1) if rows == self.max_rows else self.tokens_a_row * rows

    def _tokens(self, rows: int) -> list[int]:
        """Of steps that are not of decode tokens alone, and so of more tokens than rows. Half a doubling too where a
        step is long, for what is left of many prompts, and where it is short, for one prompt beside rows that decode:
        they would be padded by up to as much."""
        most = max(self.max_tokens, rows + 1)
        sizes = _sizes(self.least_tokens, 2, most)
        sizes += [n * 3 // 2 for n in sizes if self.halves and (n >= LONG or n < SHORT)]
        return sorted({n for n in sizes if rows < n < most} | {most})

    def _hidden_tokens(self) -> list[int]:
        tokens = self._tokens(self.max_rows)
        return sorted({_up(1024, tokens), tokens[-1]})


def steps_in_time(seconds: float) -> tuple[int, ...]:
    """How many decode steps a dispatch may take, where one takes at least `seconds`."""
    return tuple(steps for steps in STEPS if steps == 1 or steps * seconds < 1.2 * DISPATCH_SECONDS)


def _up(value: int, sizes: list[int]) -> int:
    return next((size for size in sizes if size >= value), sizes[-1])


def _sizes(least: int, growth: int, most: int) -> list[int]:
    sizes = []
    while least < most:
        sizes.append(least)
        least *= growth
    return [*sizes, most]
