"""Where training is, as a state says it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.errors import UsageError


@dataclass(frozen=True, slots=True)
class Position:
    """Batches of ``epoch`` that were handed out, of an order in so many ``lanes``."""

    epoch: int = 0
    batch: int = 0
    lanes: int = 1


def position_in(state: Mapping[str, Any], identity: Mapping[str, Any]) -> Position:
    """The position in a ``state`` that must be of the order which ``identity`` describes.

    Raises
    ------
    UsageError
        The state is of something else: names what.
    """
    wrong = [
        f"{key} is {state.get(key)!r} there, {value!r} here"
        for key, value in identity.items()
        if state.get(key) != value
    ]
    numbers = [state.get(key) for key in ("epoch", "batch", "lanes")]
    if not all(isinstance(n, int) and n >= 0 for n in numbers):
        wrong.append(f"epoch, batch and lanes are {numbers}")
    if wrong:
        raise UsageError(f"the state is not of this loader: {'; '.join(wrong)}")
    return Position(*numbers)  # type: ignore[arg-type]
