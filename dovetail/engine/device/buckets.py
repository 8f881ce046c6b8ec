"""Buckets: the few shapes that steps are compiled for; a plan is padded to the nearest one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.engine.device.batch import Shape
from dovetail.engine.schedule.plan import StepPlan

# Decode steps that a dispatch may have: each number is compiled, because XLA runs a loop of known length without asking
# the host after every iteration.
STEPS = (1, 4, 16)
DISPATCH_SECONDS = 0.02  # most seconds of a dispatch of several decode steps: a new request waits for one of them
SHORT = 1024  # tokens below which a step is mostly one prompt's
FEW_ROWS, FEW_TOKENS = 8, 512  # of a first request or two
LEAST_TOKENS = 32  # of a step with prompts on a CPU
MOST_VERIFIED = 64  # rows of a verify step: with more, computing takes longer than reading the weights
LONG = 4096  # tokens from which a step takes so long that its padding matters


@dataclass(frozen=True)
class Buckets:
    """Hold the shapes of an engine's steps. The defaults are an accelerator's."""

    max_rows: int
    max_tokens: int
    max_pages: int
    max_decode_steps: int | None = None  # per dispatch; None: as many as `step_seconds` allows
    step_seconds: tuple[float, float] = (0.0, 0.0)  # least seconds of a decode step, and seconds per row
    few_rows: tuple[int, ...] = (1, 8, 32)  # of decode steps, doubled from the last one on
    least_rows: int = 64  # of a step with prompts: fewer save no time, except on a CPU
    least_tokens: int = 128  # of a step with prompts: fewer cost little more than reading the weights, except on a CPU
    halves: bool = True  # whether there are sizes between the doublings for the shortest and the longest steps
    few_hidden: bool = True  # two shapes for all steps that keep hidden states, or as many as for others (on a CPU)
    drafts: tuple[int, ...] = ()  # draft tokens per row of verify steps, in ascending order; empty: no speculation
    tokens_a_row: int = 16  # tokens per row of a step with prompts from which its rows cost little

    def shape_for(self, plan: StepPlan, keeps_hidden: bool = False) -> Shape:
        """Return the shape that a plan is padded to."""
        if plan.num_drafts:
            return self.verify(len(plan.rows), plan.num_drafts)
        if plan.is_decode and not keeps_hidden:
            return self.decode(len(plan.rows), plan.steps)
        return self.mixed(plan.num_tokens, len(plan.rows), keeps_hidden)

    def decode(self, rows: int, steps: int = 1) -> Shape:
        """Return the shape of a decode step."""
        rows = _up(rows, self._decode_rows())
        return Shape(rows, rows, self.max_pages, steps)

    def verify(self, rows: int, drafts: int) -> Shape:
        """Return the shape of a verify step with up to `drafts` draft tokens per row."""
        rows, drafts = _up(rows, self._decode_rows()), _up(drafts, [*self.drafts])
        return Shape(rows * (1 + drafts), rows, self.max_pages, drafts=drafts)

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
        """Return the shape of the largest step."""
        return Shape(self._tokens(self.max_rows)[-1], self.max_rows, self.max_pages)

    def usual(self) -> list[Shape]:
        """Return every shape that a plan can have, those that take longest to compile first."""
        pages = self.max_pages
        shapes = [Shape(rows, rows, pages, n) for rows in self._decode_rows() for n in self.steps_for(rows)]
        shapes += [self.verify(rows, n) for rows in self._decode_rows() for n in self.drafts if rows <= MOST_VERIFIED]
        for rows in self._mixed_rows():
            own = [Shape(n, rows, pages) for n in self._tokens(rows) if n <= self._most_tokens(rows)]
            shapes += [*own, own[0].sampler]
            shapes += [replace(shape, keeps_hidden=True) for shape in own if not self.few_hidden]
        if self.few_hidden:
            shapes += [Shape(tokens, self.max_rows, pages, keeps_hidden=True) for tokens in self._hidden_tokens()]
        return sorted(shapes, key=lambda shape: -shape.tokens)

    def first(self) -> list[Shape]:
        """Return the shapes that a first request or two need."""
        return [s for s in self.usual() if s.rows <= FEW_ROWS and s.tokens <= FEW_TOKENS and not s.keeps_hidden]

    def steps_for(self, rows: int) -> tuple[int, ...]:
        """Return how many decode steps a dispatch with this many rows may have."""
        least, each = self.step_seconds
        steps = steps_in_time(least + each * _up(rows, self._decode_rows()))
        return tuple(n for n in steps if n <= (self.max_decode_steps or n))

    def _decode_rows(self) -> list[int]:
        *few, last = self.few_rows
        return [n for n in few if n < self.max_rows] + _sizes(last, 2, self.max_rows)

    def _mixed_rows(self) -> list[int]:
        return _sizes(min(self.least_rows, self.max_rows), 8, self.max_rows)

    def _most_tokens(self, rows: int) -> int:
        """Return the most tokens of a step with this many rows; with more tokens, the most rows cost little."""
        return max(self.max_tokens, rows + 1) if rows == self.max_rows else self.tokens_a_row * rows

    def _tokens(self, rows: int) -> list[int]:
        """Return the token counts of steps with prompts, which have more tokens than rows.

        Half doublings are added where a step is long, for the rest of many prompts, and where it is short, for one
        prompt beside decoding rows: both would be padded by up to as much again.
        """
        most = max(self.max_tokens, rows + 1)
        sizes = _sizes(self.least_tokens, 2, most)
        sizes += [n * 3 // 2 for n in sizes if self.halves and (n >= LONG or n < SHORT)]
        return sorted({n for n in sizes if rows < n < most} | {most})

    def _hidden_tokens(self) -> list[int]:
        tokens = self._tokens(self.max_rows)
        return sorted({_up(1024, tokens), tokens[-1]})


def steps_in_time(seconds: float) -> tuple[int, ...]:
    """Return how many decode steps a dispatch may have if one takes at least `seconds`."""
    return tuple(steps for steps in STEPS if steps == 1 or steps * seconds < 1.2 * DISPATCH_SECONDS)


def _up(value: int, sizes: list[int]) -> int:
    return next((size for size in sizes if size >= value), sizes[-1])


def _sizes(least: int, growth: int, most: int) -> list[int]:
    sizes = []
    while least < most:
        sizes.append(least)
        least *= growth
    return [*sizes, most]
