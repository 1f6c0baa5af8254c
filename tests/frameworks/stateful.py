"""Batches by torchdata's StatefulDataLoader, stopped and resumed: prints the ids that came, as JSON.

Run as: stateful.py FOLDER WORKERS
"""

import json
import sys
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from shardwright.datasets import open_dataset
from shardwright.loaders import Loader, LoaderOptions, make_loader

FOLDER, WORKERS = sys.argv[1], int(sys.argv[2])


def ours(batch_size: int = 8, **options: Any) -> Loader:
    dataset = open_dataset(FOLDER, columns=("image", "label", "id"))
    return make_loader(
        dataset, batch_size, shuffle=True, seed=5, options=LoaderOptions(quiet=True, workers=2, **options)
    )


def theirs(workers: int = WORKERS, batch_size: int = 8, **options: Any) -> Any:
    loader = ours(batch_size)
    return StatefulDataLoader(
        loader.dataset,
        batch_sampler=loader.batch_sampler,
        collate_fn=loader.collate_fn,
        num_workers=workers,
        **options,
    )


def ids_of(batches: Any, most: int = 1000) -> list[list[str]]:
    return [list(ids) for (_, _, ids), _ in zip(batches, range(most), strict=False)]


def stopped(loader: Any, after: int) -> tuple[list[list[str]], Any]:
    """What came until then, and the state, by way of JSON."""
    iterator = iter(loader)
    ids = [list(next(iterator)[2]) for _ in range(after)]
    return ids, json.loads(json.dumps(loader.state_dict()))


def resumed(state: Any, **options: Any) -> Any:
    loader = theirs(**options)
    loader.load_state_dict(state)
    return loader


def refusal(loader: Any) -> list[str]:
    try:
        next(iter(loader))
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def main() -> None:
    loader = ours()
    found: dict[str, Any] = {"expected": [ids_of(loader) for _ in range(3)]}

    first, state = stopped(theirs(), 4)
    second, state = stopped(resumed(state), 5)
    loader = resumed(state)
    found["twice"] = [first + second + ids_of(loader), ids_of(loader), ids_of(loader)]

    loader = theirs()
    whole = ids_of(loader)
    ended = resumed(json.loads(json.dumps(loader.state_dict())))
    found["at the end"] = [whole, ids_of(ended), ids_of(ended)]

    loader = theirs()
    stopped(loader, 3)
    abandoned, state = stopped(loader, 2)
    loader = resumed(state)
    found["after an epoch that was left"] = [abandoned + ids_of(loader), ids_of(loader)]

    loader = theirs(snapshot_every_n_steps=3)
    first, state = stopped(loader, 5)
    found["every third"] = first + ids_of(resumed(state, snapshot_every_n_steps=3))

    _, state = stopped(theirs(), 4)
    found["other batch size"] = refusal(resumed(state, batch_size=4))
    found["other workers"] = refusal(resumed(state, workers=2 - WORKERS))
    # Of their state the sampler's part is a state of ours, which knows nothing of workers.
    main_state = state["_snapshot"]["_main_snapshot"] if WORKERS else state
    loader = ours(engine="threads")
    loader.load_state_dict(main_state["_sampler_iter_state"])
    found["by ours"] = ids_of(loader)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
