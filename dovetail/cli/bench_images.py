"""Random images of `dovetail bench serve`, with the option names of `vllm bench serve`."""

from __future__ import annotations

import ast
import base64
import io
import random
from dataclasses import dataclass
from typing import Any

from dovetail.core.errors import UserError

BUCKETS = "--random-mm-bucket-config"
COARSE = 16  # pixels of a spot: noise of single pixels would make files far larger than those of photos
WORDS = (
    "a an and are as at but by for from had he in is it not of on or she that the they this to was we were you".split()
)


@dataclass(frozen=True)
class RandomImages:
    """Make the messages of requests with random images.

    Attributes:
        count: Images per request.
        buckets: Height and width of images, and their probability.
    """

    count: int
    buckets: tuple[tuple[tuple[int, int], float], ...]

    @classmethod
    def parse(cls, count: int, text: str) -> RandomImages:
        """Return the images of vLLM's options; `text` is as `{(height, width, 1): probability}`.

        Raises:
            UserError: `text` has another form.
        """
        try:
            found = ast.literal_eval(text)
            sizes = {(int(h), int(w), int(frames)): float(share) for (h, w, frames), share in found.items()}
        except (ValueError, SyntaxError, TypeError, AttributeError):
            raise UserError(f"`{BUCKETS}` must be as {{(256, 256, 1): 1.0}}, got {text!r}", param=BUCKETS) from None
        if any(frames != 1 for (_, _, frames), share in sizes.items() if share):
            raise UserError(f"`{BUCKETS}` must have 1 frame per image, as videos are not supported", param=BUCKETS)
        used = tuple(((h, w), share) for (h, w, _), share in sizes.items() if share)
        if not used or any(min(h, w) < 1 or share < 0 for (h, w), share in used):
            raise UserError(f"`{BUCKETS}` must have positive sizes and probabilities, got {text!r}", param=BUCKETS)
        return cls(count, used)

    def describe(self) -> dict[str, Any]:
        """Return the images as JSON types."""
        return {"count": self.count, "buckets": {f"{h}x{w}": share for (h, w), share in self.buckets}}

    def messages(self, rng: random.Random, words: int) -> list[dict[str, Any]]:
        """Return a conversation: random images and a text of as many words, most of which are one token."""
        sizes, shares = zip(*self.buckets, strict=True)
        urls = [_data_url(rng, *size) for size in rng.choices(sizes, shares, k=self.count)]
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content.append({"type": "text", "text": " ".join(rng.choices(WORDS, k=words))})
        return [{"role": "user", "content": content}]


def _data_url(rng: random.Random, height: int, width: int) -> str:
    """Return an image of random spots as a data: URL of a JPEG file."""
    from PIL import Image

    coarse = -(-width // COARSE), -(-height // COARSE)
    spots = Image.frombytes("RGB", coarse, rng.randbytes(3 * coarse[0] * coarse[1]))
    file = io.BytesIO()
    spots.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
