"""The resampler against Pillow: every bit."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from refusals import refuses

from dovetail.io.images.resample import FILTERS, resize

pytestmark = pytest.mark.slow

side = st.integers(1, 70)


def by_pillow(image, height, width, resample):
    return np.array(Image.fromarray(image).resize((width, height), Image.Resampling[resample.upper()]))


@settings(max_examples=150, deadline=None)
@given(side, side, side, side, st.sampled_from(sorted(FILTERS)), st.integers(0, 3))
@example(1, 1, 70, 70, "lanczos", 0)
@example(64, 64, 64, 63, "bicubic", 1)
def test_sizes_equal_pillow(before_h, before_w, height, width, resample, seed):
    image = np.random.default_rng(seed).integers(0, 256, (before_h, before_w, 3), dtype=np.uint8)
    assert (resize(image, height, width, resample) == by_pillow(image, height, width, resample)).all()


@pytest.mark.parametrize("resample", FILTERS)
@pytest.mark.parametrize("size", [(896, 896), (512, 384), (1011, 1531)])
def test_extreme_values_of_a_photo_size_equal_pillow(resample, size):
    image = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), (701, 1003, 3))  # overshoots are clipped
    assert (resize(image, *size, resample) == by_pillow(image, *size, resample)).all()


def test_the_horizontal_pass_is_first_for_tall_images_too():
    """Pillow from 12.2 on runs the vertical pass first where the height is more than 100 times the width."""
    image = np.random.default_rng(0).integers(0, 256, (321, 3, 3), dtype=np.uint8)
    in_two = by_pillow(by_pillow(image, 321, 16, "bicubic"), 19, 16, "bicubic")
    assert (resize(image, 19, 16, "bicubic") == in_two).all()


def test_same_size_is_the_same_image():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert (resize(image, 5, 7, "lanczos") == image).all()


def test_unknown_filter_is_refused():
    with refuses("resample", naming="nearest"):
        resize(np.zeros((2, 2, 3), np.uint8), 4, 4, "nearest")
