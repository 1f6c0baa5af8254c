"""A rank of a job of torchrun over gloo: evaluates, trains, stops in the middle; or goes on where such a job stopped.

Run as: torchrun --standalone --nproc-per-node N under_torchrun.py FOLDER OUT BATCH_SIZE STOP [STATES]
Leaves what it saw in OUT/rankN.json, of each order; STATES are those of the job to go on from.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.datasets import open_dataset
from shardwright.loaders import Loader, LoaderOptions, make_loader

FOLDER, OUT, BATCH_SIZE, STOP = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
STATES = Path(sys.argv[5]) if len(sys.argv) > 5 else None
ORDERS: dict[str, dict[str, Any]] = {
    "exact": {"shuffle_by": "exact"},
    "block": {"shuffle_by": "block", "mixed_chunks": 3},
    "sequential": {"uneven": "pad"},
}


def loader_of(order: str, shuffle: bool, **options: Any) -> Loader:
    dataset = open_dataset(FOLDER, columns=("image", "label", "id"))
    chosen = LoaderOptions(workers=1, quiet=True, **options)
    return make_loader(dataset, BATCH_SIZE, shuffle=shuffle and order != "sequential", seed=5, options=chosen)


def train(loader: Loader, most: int = 1 << 30) -> list[list[str]]:
    """Steps with an all-reduce each: ranks that had other numbers of batches would hang."""
    net = nn.parallel.DistributedDataParallel(nn.Linear(3, 5))
    seen = []
    for _, (images, labels, ids) in zip(range(most), loader, strict=False):
        nn.functional.cross_entropy(net(images.float().mean((2, 3))), labels).backward()
        seen.append(list(ids))
    return seen


def main() -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for order, options in ORDERS.items():
        if STATES is not None:
            loader = loader_of(order, True, **options)
            loader.load_state_dict(json.loads(STATES.read_text())[order])
            found[order] = {"rest": train(loader)}
            continue
        whole = loader_of(order, True, **options)
        begun = loader_of(order, True, **options)
        shuffled = {**options, "uneven": "spread"}  # evaluation, in that order too
        dropped = {**options, "uneven": "drop"}
        found[order] = {
            "evaluated": [list(ids) for _, _, ids in loader_of(order, True, **shuffled)],
            "trained": train(whole),
            "dropped": train(loader_of(order, True, **dropped)),
            "begun": train(begun, STOP),
            "state": begun.state_dict(),
        }
    (OUT / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
