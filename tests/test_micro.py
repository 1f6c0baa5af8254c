"""The batch size of a step where gradients are accumulated."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import UsageError
from shardwright.loaders import micro_batch

COUNTS = st.integers(1, 64)


@given(COUNTS, COUNTS, COUNTS)
def test_all_batches_of_a_step_are_the_effective_batch(size: int, steps: int, world: int) -> None:
    assert micro_batch(size * steps * world, steps, world) == size


@given(st.integers(1, 5000), COUNTS, COUNTS)
def test_what_does_not_divide_names_the_nearest_that_does(effective: int, steps: int, world: int) -> None:
    if effective % (steps * world) == 0:
        return
    with pytest.raises(UsageError) as caught:
        micro_batch(effective, steps, world)
    named = [int(n) for n in re.findall(r"\d+", str(caught.value).rpartition("take")[2])]
    assert 1 <= len(named) <= 2
    for near in named:
        assert abs(near - effective) < steps * world
        assert micro_batch(near, steps, world) >= 1


def test_the_error_in_words() -> None:
    with pytest.raises(
        UsageError, match="effective_batch is 250, which 4 accumulation_steps on 2 ranks, 8 batches"
    ):
        micro_batch(250, 4, 2)
    assert micro_batch(32) == 32


@pytest.mark.parametrize("numbers", [(0, 1, 1), (8, 0, 1), (8, 1, -1), (8.0, 1, 1), (True, 1, 1)])
def test_what_is_no_number_of_samples(numbers: Any) -> None:
    with pytest.raises(UsageError, match="expected a whole number of at least 1"):
        micro_batch(*numbers)
