"""The few shapes that steps are compiled for: a plan is padded up to the nearest."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.engine.batch import Shape
from dovetail.engine.plan import Plan

STEPS = (1, 4, 16)  # decode steps a dispatch may take: each is compiled, and XLA runs a loop it knows the length of
# without asking the host after every turn


@dataclass(frozen=True)
class Buckets:
    """Powers of `growth`: 2 where compiling ahead is cheap beside padding (GPU, TPU), more on a CPU."""

    max_rows: int
    max_tokens: int
    max_pages: int
    growth: int = 2

    def shape_for(self, plan: Plan, greedy: bool) -> Shape:
        pages = _up(max(len(row.seq.pages) for row in plan.rows), 64, 4, self.max_pages)
        if plan.is_decode:
            rows = _up(len(plan.rows), 1, self.growth, self.max_rows)
            return Shape(rows, rows, pages, greedy, plan.steps)
        rows = _up(len(plan.rows), 8, 8, self.max_rows)
        tokens = max(_up(plan.num_tokens, 16, self.growth, self.max_tokens), rows + 1)  # T > S: not a decode step
        return Shape(tokens, rows, pages, greedy)

    def largest(self) -> Shape:
        return Shape(max(self.max_tokens, self.max_rows + 1), self.max_rows, self.max_pages, True)

    def common(self, num_pages: int) -> list[Shape]:
        """The shapes worth compiling before anyone asks: greedy and sampled decode, and prompts, of usual lengths."""
        shapes = []
        for pages in _steps(64, 4, min(num_pages, self.max_pages)):
            for rows in _steps(1, self.growth, self.max_rows):
                shapes += [Shape(rows, rows, pages, True, steps) for steps in STEPS]
            for tokens in _steps(128, self.growth, self.max_tokens):
                for rows in _steps(8, 8, min(self.max_rows, tokens // 2)):
                    shapes.append(Shape(tokens, rows, pages, True))
        return list(dict.fromkeys(shapes))


def _up(value: int, least: int, growth: int, most: int) -> int:
    size = least
    while size < value:
        size *= growth
    return min(size, most)


def _steps(least: int, growth: int, most: int) -> list[int]:
    sizes = []
    while least < most:
        sizes.append(least)
        least *= growth
    return [*sizes, most]
