"""Pure: which pictures of a source a copy took, and in which order, by what its manifest remembers of the command.

Guesses: what was done to the data sets before that one is not remembered.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.convert.plan import MADE_OF, asked_for
from shardwright.convert.selection import canonical, parse_shares, sides
from shardwright.errors import UsageError

#: Those of some ids that the copy took.
Selection = Callable[[Sequence[str]], Sequence[str]]


def selection_of(source: Mapping[str, Any]) -> Selection | None:
    """What the command took of all ids, by the ``source`` of a manifest; None where that is not remembered."""
    command, told = asked_for({"source": source})
    match command:
        case "split":
            return _side(source[MADE_OF].get("part"), told)
        case "merge" if told.get("prefix") or type(told.get("seed")) is not int:
            return None  # ids of other folders; or one data set's rows after another's
        case "reshard" if told.get("ids") is not None:
            return None  # its hash alone
        case "reshard" if names := told.get("only_classes"):
            return _of_classes(names)
    return lambda ids: ids


def _side(part: object, told: Mapping[str, Any]) -> Selection | None:
    by, seed = told.get("by"), told.get("seed")
    if not isinstance(by, dict) or not isinstance(part, str) or part not in by or type(seed) is not int:
        return None
    try:
        shares = parse_shares(",".join(f"{name}={share}" for name, share in by.items()))
    except UsageError:  # what a manifest says may be anything
        return None
    in_order = {name: shares[name] for name in by if name in shares}
    return lambda ids: [ids[k] for k in sides(ids, seed, in_order)[part].tolist()]


def _of_classes(names: object) -> Selection | None:
    if not isinstance(names, list):
        return None
    return lambda ids: [id for id in ids if id.partition("/")[0] in names]


def orders(
    ids: Sequence[str], rejected: Collection[str], seed: int, selection: Selection
) -> Iterator[list[str]]:
    """Orders that the rows of a copy may have, where the whole source is ``ids``.

    The permutation is that of the conversion, which dealt out rejected pictures too; of a later one of all its rows;
    or of the copy's own.
    """
    whole = [id for id in ids if id not in rejected]
    for permuted, taken in ((ids, selection), (whole, selection), (selection(whole), None)):
        order = [permuted[k] for k in canonical(permuted, np.arange(len(permuted)), seed).tolist()]
        own = order if taken is None else taken(order)
        yield [id for id in own if id not in rejected]
