"""The few shapes that steps are compiled for: a plan is padded up to the nearest."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.engine.batch import Kind, Shape
from dovetail.engine.plan import StepPlan

STEPS = (1, 4, 16)  # decode steps a dispatch may take: each is compiled, and XLA runs a loop it knows the length of
# without asking the host after every turn
LONG = 4096  # tokens of a step that takes the device so long that its padding counts
USUAL_TOKENS = 2048  # shapes for longer sequences are compiled when one comes


@dataclass(frozen=True)
class Buckets:
    max_rows: int
    max_tokens: int
    max_pages: int
    page_size: int = 16
    few_rows: int = 8  # of a decode step, up to which each row costs next to nothing; on a CPU each costs
    growth: int = 2  # of the tokens of a prompt's step; more where compiling is dear beside padding, as on a CPU

    def shape_for(self, plan: StepPlan, kind: Kind) -> Shape:
        pages = _up(max(len(row.seq.pages) for row in plan.rows), self._pages())
        if plan.is_decode:
            rows = _up(len(plan.rows), self._decode_rows())
            return Shape(rows, rows, pages, kind, plan.steps)
        rows = _up(len(plan.rows), _sizes(8, 8, self.max_rows))
        tokens = max(_up(plan.num_tokens, self._tokens()), rows + 1)  # T > S: not a decode step
        return Shape(tokens, rows, pages, kind)

    def largest(self) -> Shape:
        return Shape(max(self.max_tokens, self.max_rows + 1), self.max_rows, self.max_pages)

    def needed(self) -> list[Shape]:
        """With these a plan of a usual length and usual parameters can run, if not at its best."""
        pages = self._usual_pages()[-1]
        tokens = max(self.max_tokens, self.max_rows + 1)
        shapes = [Shape(self.max_rows, self.max_rows, pages, kind, n) for kind in ("greedy", "plain") for n in STEPS]
        return [*shapes, Shape(tokens, self.max_rows, pages), Shape(tokens, self.max_rows, pages, "plain")]

    def common(self) -> list[Shape]:
        """What is worth compiling before anyone asks, the most wanted first."""
        shapes = []
        for pages in self._usual_pages():
            for kind in ("plain", "greedy", "full"):
                for rows in self._decode_rows():
                    shapes += [Shape(rows, rows, pages, kind, n) for n in (STEPS if kind != "full" else (1,))]
                for tokens in [n for n in self._tokens() if n >= 128]:
                    for rows in _sizes(8, 8, min(self.max_rows, tokens // 2)):
                        shapes.append(Shape(tokens, rows, pages, kind))
        return shapes

    def _decode_rows(self) -> list[int]:
        return [1, *_sizes(self.few_rows, 2, self.max_rows)] if self.max_rows > 1 else [1]

    def _tokens(self) -> list[int]:
        """Where a step is long, half a doubling too: what is left of many prompts would be padded by up to as much."""
        sizes = _sizes(16, self.growth, self.max_tokens)
        between = [n * 3 // 2 for n in sizes if n >= LONG and self.growth == 2 and n * 3 // 2 < self.max_tokens]
        return sorted(sizes + between)

    def _pages(self) -> list[int]:
        return _sizes(64, 4, self.max_pages)

    def _usual_pages(self) -> list[int]:
        usual = _up(-(-USUAL_TOKENS // self.page_size), self._pages())
        return [pages for pages in self._pages() if pages <= usual]


def _up(value: int, sizes: list[int]) -> int:
    return next((size for size in sizes if size >= value), sizes[-1])


def _sizes(least: int, growth: int, most: int) -> list[int]:
    sizes = []
    while least < most:
        sizes.append(least)
        least *= growth
    return [*sizes, most]
