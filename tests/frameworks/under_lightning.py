"""Two ranks of Lightning's Trainer over our loaders: each leaves the ids that it saw in a file.

Run as: under_lightning.py FOLDER EVEN OUT, where EVEN is a data set of whole global batches of 16. Lightning runs this
again for the second rank.
"""

import torchvision_without_ops  # noqa: F401

# isort: split
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwright.datasets import ShardedDataset, open_dataset
from shardwright.loaders import Loader, LoaderOptions, collate, make_loader

FOLDER, EVEN, OUT = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def opened(folder: str = FOLDER) -> ShardedDataset:
    return open_dataset(folder, columns=("image", "label", "id"))


def loader_of(shuffle: bool, folder: str = FOLDER, **options: Any) -> Loader:
    return make_loader(opened(folder), 8, shuffle=shuffle, options=LoaderOptions(quiet=True), **options)


class Model(lightning.LightningModule):
    """Notes the ids of each batch, by stage and by what epoch Lightning is in."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net = nn.Linear(3, 5)
        self.options = options
        self.seen: dict[str, dict[int, list[list[str]]]] = {"train": {}, "val": {}, "predict": {}}

    def _noted(self, stage: str, batch: Any) -> Tensor:
        images, _, ids = batch
        self.seen[stage].setdefault(self.current_epoch, []).append(list(ids))
        return self.net(images.float().mean((2, 3)))

    def training_step(self, batch: Any, _: int) -> Tensor:
        return nn.functional.cross_entropy(self._noted("train", batch), batch[1])

    def validation_step(self, batch: Any, _: int) -> None:
        if not self.trainer.sanity_checking:
            self._noted("val", batch)

    def predict_step(self, batch: Any, _: int) -> None:
        self._noted("predict", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self) -> Any:
        return loader_of(True, **self.options)

    def val_dataloader(self) -> Any:
        return loader_of(False, **self.options)


def trainer_of(epochs: int, save: bool = False, **options: Any) -> lightning.Trainer:
    every = ({"every_n_train_steps": 5}, {"every_n_epochs": 1})
    saving = [ModelCheckpoint(OUT / "saved", "{step}", save_top_k=-1, **each) for each in every]  # type: ignore[arg-type]
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        callbacks=saving if save else [],
        enable_checkpointing=save,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def shown(model: Model, work: Callable[[Model], Any]) -> dict[str, Any]:
    """What the model saw, and the error if there was one."""
    try:
        work(model)
    except Exception as error:
        return {**model.seen, "error": f"{type(error).__name__}: {error}"}
    return {**model.seen, "error": None}


def main() -> None:
    # First, while there are no ranks yet: they are there when fit begins.
    early = loader_of(True), loader_of(False)
    found = {"early": shown(Model(), lambda model: trainer_of(3).fit(model, *early))}
    found["hooks"] = shown(Model(), lambda model: trainer_of(3, save=True).fit(model))
    found["even"] = shown(Model(folder=EVEN), lambda model: trainer_of(2).fit(model))
    for step in (5, 13, 20, 25):
        saved = OUT / "saved" / f"step={step}.ckpt"
        found[f"from {step}"] = shown(
            Model(),
            lambda model, saved=saved: trainer_of(3).fit(model, ckpt_path=saved),  # type: ignore[misc]
        )
    found["unsharded"] = shown(Model(ranks=None), lambda model: trainer_of(1).fit(model))
    found["all on each"] = shown(
        Model(ranks=None), lambda model: trainer_of(1, use_distributed_sampler=False).fit(model)
    )
    found["predict"] = shown(Model(), lambda model: trainer_of(1).predict(model, loader_of(False)))
    stock = DataLoader(opened(), 8, collate_fn=collate)
    found["predict by torch's"] = shown(Model(), lambda model: trainer_of(1).predict(model, stock))
    (OUT / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
