"""A training loop as that of timm's train.py, over our loaders: prints what was learned, as JSON.

Run as: like_timm.py TRAIN VAL
"""

import torchvision_without_ops  # noqa: F401

# isort: split
import json
import sys
from typing import Any

import torch
from timm import create_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, accuracy, random_seed
from torch import Tensor, nn

from shardwright.datasets import open_dataset
from shardwright.loaders import LoaderOptions, make_loader

EPOCHS = 6


def normalised(images: Tensor, stats: Any) -> Tensor:
    """What timm's PrefetchLoader does on a GPU; its Mixup wants floats."""
    mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in stats)
    return images.float().sub_(mean).div_(std)


def train_one_epoch(
    epoch: int,
    model: nn.Module,
    loader: Any,
    optimizer: Any,
    loss_fn: Any,
    mixup_fn: Any,
    scheduler: Any,
    ema: Any,
) -> float:
    losses = AverageMeter()
    model.train()
    num_updates = epoch * len(loader)
    for images, target in loader:
        images, target = mixup_fn(normalised(images, STATS), target)
        loss = loss_fn(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        num_updates += 1
        ema.update(model, step=num_updates)
        losses.update(loss.item(), images.size(0))
        scheduler.step_update(num_updates=num_updates, metric=losses.avg)
    return losses.avg


@torch.inference_mode()
def validate(model: nn.Module, loader: Any) -> tuple[float, int]:
    top1 = AverageMeter()
    model.eval()
    for images, target in loader:
        (acc1,) = accuracy(model(normalised(images, STATS)), target)
        top1.update(acc1.item(), images.size(0))
    return top1.avg, top1.count


def main() -> None:
    random_seed(0)
    options = LoaderOptions(quiet=True)
    # Mixup mixes pairs: no batch may be of an odd number.
    loader_train = make_loader(train, 16, shuffle=True, drop_last=True, options=options)
    loader_eval = make_loader(open_dataset(sys.argv[2]), 16, options=options)
    classes = len(train.classes)
    model = create_model("test_resnet", num_classes=classes)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=EPOCHS,
        updates_per_epoch=len(loader_train),
        step_on_epochs=False,
    )
    mixup_fn = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=classes)
    ema = ModelEmaV3(model, decay=0.5)
    found: dict[str, Any] = {"before": validate(model, loader_eval), "losses": []}
    for epoch in range(EPOCHS):
        if hasattr(loader_train.sampler, "set_epoch"):  # train.py: where it is distributed
            loader_train.sampler.set_epoch(epoch)
        found["losses"].append(
            train_one_epoch(
                epoch, model, loader_train, optimizer, SoftTargetCrossEntropy(), mixup_fn, scheduler, ema
            )
        )
    found["epoch"] = loader_train.state_dict()["epoch"]
    found["after"], found["ema"] = validate(model, loader_eval), validate(ema.module, loader_eval)
    print(json.dumps(found))


if __name__ == "__main__":
    train = open_dataset(sys.argv[1])
    STATS = (train.manifest.stats.mean, [80.0] * 3)
    main()
