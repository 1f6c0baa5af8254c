"""Train a small CNN from shards. Copy this file, and put your own network and step in.

    python examples/train.py build/shards

SHARDS is what `shardwright convert` wrote: data sets called train and val, or one data set, of which a tenth
is then held out. On a CPU, a run is the same to the last bit for the same seed, shards, torch, number of
threads and kind of order (which the loader says that it chose).
"""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, random_split

from shardwright.datasets import ShardedDataset, open_dataset
from shardwright.errors import ShardwrightError
from shardwright.loaders import collate, make_loader

Batches = Iterable[tuple[Tensor, Tensor]]  # images uint8 (N, C, H, W), channels-last; labels int64 (N,)


class Net(nn.Module):
    """A small CNN for images of any size, uint8 (N, C, H, W), to scores (N, classes). It normalises them."""

    def __init__(self, channels: int, classes: int, mean: Iterable[float], std: Iterable[float]) -> None:
        super().__init__()
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(list(mean)).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(list(std)).clamp(min=1).view(1, -1, 1, 1))
        layers: list[nn.Module] = []
        for width, kernel, stride in [(24, 7, 4), (48, 3, 2), (48, 3, 1), (96, 3, 2), (96, 3, 1)]:
            layers.append(nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False))
            layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        self.body = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.body((images.float() - self.mean) / self.std)
        return scores


def open_shards(shards: Path, batch_size: int, seed: int) -> tuple[ShardedDataset, Any, Batches]:
    """The training data set, the batches to train on, and those to validate on."""
    train = open_dataset(shards / "train" if (shards / "train").is_dir() else shards)
    drop_last = len(train) >= 2 * batch_size  # no small last batch, which would upset the batch norm
    for name in ("val", "valid", "validation", "test"):
        if (shards / name).is_dir():
            val = open_dataset(shards / name)
            if (val.classes, val.image_shape) != (train.classes, train.image_shape):
                sys.exit(f"train.py: '{val.path}' has other classes or another size than '{train.path}'")
            batches = make_loader(train, batch_size, shuffle=True, seed=seed, drop_last=drop_last)
            return train, batches, make_loader(val, batch_size)
    # No second data set: hold out a tenth. Subsets and all else over ours work with torch's own loader; our
    # collate lets the batches through whole, as they were read.
    if len(train) < 2:
        sys.exit(f"train.py: '{train.path}' has {len(train)} images: none can be held out")
    held = max(1, len(train) // 10)
    draw = torch.Generator().manual_seed(seed)
    rest, val_set = random_split(train, [len(train) - held, held], draw)
    stock = DataLoader(rest, batch_size, True, drop_last=drop_last, collate_fn=collate, generator=draw)
    return train, stock, DataLoader(val_set, batch_size, collate_fn=collate)


def train_epoch(net: Net, batches: Batches, optimizer: Any, schedule: Any, device: str) -> tuple[float, int]:
    """Train on each batch once. Returns the mean loss, and the number of images."""
    net.train()
    losses, seen = [], 0
    for images, labels in batches:
        images = images.to(device, non_blocking=True)  # as uint8: a quarter of what floats would be
        if torch.rand(()) < 0.5:
            images = images.flip(3)  # half of the batches mirrored
        loss = nn.functional.cross_entropy(net(images), labels.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        seen += len(images)
    return torch.stack(losses).mean().item(), seen


@torch.no_grad()
def accuracy(net: Net, batches: Batches, device: str) -> float:
    """The share of images that are given their class."""
    net.eval()
    hits = [net(images.to(device)).argmax(1).cpu() == labels for images, labels in batches]
    return torch.cat(hits).float().mean().item()


def train(options: argparse.Namespace) -> None:
    """Train as ``options`` say, and print a line an epoch."""
    torch.manual_seed(options.seed)
    data, batches, val_batches = open_shards(options.shards, options.batch_size, options.seed)
    stats = data.manifest.stats
    net = Net(data.image_shape[0], len(data.classes), stats.mean, stats.std).to(options.device)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
    steps = max(2, options.epochs * len(batches))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=options.lr, total_steps=steps)
    print(f"{data}, {len(data.classes)} classes")
    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        loss, seen = train_epoch(net, batches, optimizer, schedule, options.device)
        rate = seen / (time.perf_counter() - start)
        right = accuracy(net, val_batches, options.device)
        print(f"epoch {epoch:2}: loss {loss:.3f}, {rate:5.0f} images/s, validation accuracy {right:.1%}")


def main() -> None:
    """Parse the command line and train. Exit code 1, and one line: the shards cannot be read."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser = argparse.ArgumentParser(description="Train a small CNN from shards.")
    parser.add_argument("shards", nargs="?", type=Path, default=Path("build/shards"), metavar="SHARDS")
    parser.add_argument("--epochs", type=int, default=10, metavar="N")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--lr", type=float, default=0.01, metavar="RATE", help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--device", default=str(accelerator or "cpu"), help="cpu, cuda, mps, ...")
    try:
        train(parser.parse_args())
    except ShardwrightError as error:
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":
    main()
