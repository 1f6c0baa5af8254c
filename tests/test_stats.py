"""Sums of pixels are exact, whatever their number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.convert import stats
from shardwright.convert.stats import Summing


@given(
    height=st.sampled_from([1, 255, 256, 257, 513]),
    width=st.integers(1, 5),
    channels=st.sampled_from([1, 3]),
    exact_rows=st.sampled_from([256, 300, 1000, stats.EXACT_ROWS]),
    seed=st.integers(0, 9),
)
def test_sums_are_those_of_integers(
    height: int, width: int, channels: int, exact_rows: int, seed: int
) -> None:
    """Also where the sums of the columns are carried over in the middle of an image, and more than once."""
    images = np.random.default_rng(seed).integers(0, 256, (5, height, width, channels), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "EXACT_ROWS", exact_rows)
        summing = Summing((height, width, channels))
        for number, image in enumerate(images):
            summing.add(image)
            if number == 2:  # to ask for them changes nothing
                summing.sums()
    found, whole = summing.sums(), images.reshape(-1, channels).astype(np.int64)
    assert found.pixels == len(whole)
    assert (found.total, found.squares) == (whole.sum(0).tolist(), (whole**2).sum(0).tolist())


def test_sums_beyond_what_a_float_tells() -> None:
    """Each column is exact up to 2**53; all of them together are more."""
    summing, width = Summing((1, 3, 1)), 3
    rows = stats.EXACT_ROWS - 1  # so many images of 255 would be added for days
    summing._total[:], summing._squares[:], summing._rows = 255 * rows, 255**2 * rows, rows
    last = np.array([[[254], [253], [255]]], np.uint8)
    for _ in range(2):  # the second is one too many for a column
        summing.add(last)
    found = summing.sums()
    assert found.total == [255 * rows * width + 2 * (254 + 253 + 255)]
    assert found.squares == [255**2 * rows * width + 2 * (254**2 + 253**2 + 255**2)]
    assert found.squares[0] > 2**53
