"""A rank of a job with Hugging Face Accelerate: leaves the ids that it saw in a file.

Run as: torchrun --standalone --nproc-per-node 2 under_accelerate.py FOLDER OUT
"""

import torchvision_without_ops  # noqa: F401

# isort: split
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from shardwright.datasets import open_dataset
from shardwright.loaders import Loader, LoaderOptions, make_loader

FOLDER, OUT = sys.argv[1], Path(sys.argv[2])


def loader_of(shuffle: bool = True, **options: Any) -> Loader:
    dataset = open_dataset(FOLDER, columns=("image", "label", "id"))
    return make_loader(
        dataset, 8, shuffle=shuffle, seed=3, options=LoaderOptions(quiet=True, workers=2), **options
    )


class Training:
    """A small model on all ranks; an epoch gives the ids of each batch."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        net = nn.Linear(3, 5)
        self.net, self.optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.01))

    def epoch(self, loader: Any, most: int = 1000) -> list[list[str]]:
        seen = []
        for _, (images, labels, ids) in zip(range(most), loader, strict=False):
            images, labels = images.to(self.accelerator.device), labels.to(self.accelerator.device)
            loss = nn.functional.cross_entropy(self.net(images.float().mean((2, 3))), labels)
            self.optimizer.zero_grad()
            self.accelerator.backward(loss)
            self.optimizer.step()
            seen.append(list(ids))
        return seen


def drawn(loader: Any) -> list[list[str]]:
    return [list(ids) for _, _, ids in loader]


def main() -> None:
    accelerator = Accelerator(cpu=True)
    training = Training(accelerator)
    loader = loader_of()
    found: dict[str, Any] = {"prepared is ours": accelerator.prepare(loader) is loader}
    found["train"] = [training.epoch(loader) for _ in range(2)]
    found["ends seen"] = [accelerator.gradient_state.end_of_dataloader for _ in loader_of()]

    # The state of the loader in Accelerate's checkpoint.
    accelerator.register_for_checkpointing(loader)
    first = training.epoch(loader, 4)
    accelerator.save_state(str(OUT / "saved"))
    training.epoch(loader)
    accelerator.load_state(str(OUT / "saved"))
    found["resumed"] = first + training.epoch(loader)
    loader.set_epoch(2)
    found["undisturbed"] = training.epoch(loader)

    # Evaluation: the last batches of the ranks may differ by a sample.
    gathered_ids, gathered_labels = [], []
    for _, labels, ids in loader_of(shuffle=False):
        gathered_ids += accelerator.gather_for_metrics(list(ids))
        padded = accelerator.pad_across_processes(labels, pad_index=-1)
        gathered_labels += [label for label in accelerator.gather_for_metrics(padded).tolist() if label >= 0]
    found["gathered"] = [gathered_ids, gathered_labels]

    # Sharding left to Accelerate.
    theirs = accelerator.prepare(loader_of(ranks=None))
    found["theirs"] = [type(theirs).__name__, drawn(theirs), drawn(theirs)]
    found["theirs, drop_last"] = drawn(accelerator.prepare(loader_of(ranks=None, drop_last=True)))
    accelerator.even_batches = False
    found["uneven"] = drawn(accelerator.prepare(loader_of(ranks=None)))
    (OUT / f"rank{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
