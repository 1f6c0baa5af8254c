"""A training loop as that of torchvision's references/classification, over our loaders: prints JSON.

Its transforms run in worker processes, a sample at a time. Run as: like_torchvision.py TRAIN VAL
"""

import torchvision_without_ops  # noqa: F401

# isort: split
import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet18
from torchvision.transforms import v2

from shardwright.datasets import open_dataset
from shardwright.loaders import LoaderOptions, collate, make_loader

EPOCHS = 4


class WhereItRan(nn.Module):
    """Puts the process that transformed an image into its first pixel."""

    def forward(self, image: Tensor) -> Tensor:
        image[:, 0, 0] = float(os.getpid())
        return image


def train_one_epoch(model: nn.Module, criterion: Any, optimizer: Any, data_loader: Any, device: Any) -> float:
    model.train()
    total, seen = 0.0, 0
    for image, target in data_loader:
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, seen = total + loss.item() * len(image), seen + len(image)
    return total / seen


@torch.inference_mode()
def evaluate(model: nn.Module, data_loader: Any, device: Any) -> tuple[float, int]:
    model.eval()
    right = num_processed_samples = 0
    for image, target in data_loader:
        output = model(image.to(device, non_blocking=True))
        right += int((output.argmax(1) == target.to(device)).sum())
        num_processed_samples += image.shape[0]
    return right / num_processed_samples, num_processed_samples


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cpu")
    to_floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.3] * 3)]
    # Nothing that changes the brightness: it tells the class.
    preset_train = v2.Compose(
        [v2.RandomResizedCrop(24, antialias=True), v2.RandomHorizontalFlip(0.5), *to_floats]
    )
    preset_eval = v2.Compose([v2.CenterCrop(24), *to_floats])
    dataset = open_dataset(sys.argv[1], transform=preset_train)
    mix = v2.RandomChoice(
        [v2.MixUp(num_classes=len(dataset.classes)), v2.CutMix(num_classes=len(dataset.classes))]
    )
    options = LoaderOptions(engine="processes", workers=2, quiet=True)
    data_loader = make_loader(
        dataset, 16, shuffle=True, collate_fn=lambda samples: mix(*collate(samples)), options=options
    )
    test = open_dataset(sys.argv[2], transform=preset_eval)
    data_loader_test = make_loader(test, 16, options=options)

    model = resnet18(num_classes=len(dataset.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.005, momentum=0.9)
    found: dict[str, Any] = {"before": evaluate(model, data_loader_test, device), "losses": []}
    for epoch in range(EPOCHS):
        data_loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        found["losses"].append(train_one_epoch(model, criterion, optimizer, data_loader, device))
    found["after"] = evaluate(model, data_loader_test, device)

    noting = open_dataset(sys.argv[2], transform=v2.Compose([preset_eval, WhereItRan()]))
    where = {int(n) for images, _ in make_loader(noting, 16, options=options) for n in images[:, 0, 0, 0]}
    found["processes"] = [len(where), os.getpid() in where]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
