"""`make_loader`: a loader tuned to a data set, and the checks of what was asked for."""

import warnings
from collections.abc import Callable
from typing import Any

from shardwright.datasets.base import ShardedDataset
from shardwright.errors import UsageError, whole_number
from shardwright.loaders.batches import EpochBatches
from shardwright.loaders.collating import collate
from shardwright.loaders.loader import Loader
from shardwright.loaders.options import LoaderOptions
from shardwright.loaders.plan import LoaderPlan, plan
from shardwright.loaders.transform import BatchTransform
from shardwright.loaders.world import Ranks, check_ranks, resolved


def make_loader(
    dataset: ShardedDataset,
    batch_size: int,
    shuffle: bool = False,
    *,
    seed: int = 0,
    drop_last: bool = False,
    collate_fn: Callable[[Any], Any] | None = None,
    ranks: Ranks = "auto",
    options: LoaderOptions | None = None,
) -> Loader:
    """Make a loader of whole batches over ``dataset``.

    Parameters
    ----------
    dataset
        An `H5Dataset`, an `NpyDataset`, or a subclass of one.
    batch_size
        Samples of a batch on each rank; the global batch is that times the ranks.
    shuffle
        Whether samples come in another random order each epoch, the same for the same ``seed``; else they
        come in the order of the data set. ``LoaderOptions.shuffle_by`` says what random means; which it
        is, is printed once.
    drop_last
        Whether a last batch that is shorter is left out.
    collate_fn
        Makes a batch of the samples; is given a `SampleBatch`, or a list where there are transforms.
        None: `collate`.
    ranks
        ``"auto"``: this process's rank in torch.distributed where that is initialised when an epoch begins.
        ``(rank, world)``: given. None: all samples come here; sharding is left to a framework.

    Returns
    -------
    Loader
        Yields ``(images, labels)``: uint8 (batch_size, C, H, W), channels-last in memory, and int64
        (batch_size,); one entry a column where other ``columns`` were asked for. A batch is yours to keep.
        Its ``worker_init_fn`` may be set before the first epoch, and is called as in any DataLoader: once in each
        worker process, with its number, where there are processes.

    Raises
    ------
    UsageError
        A parameter out of range, or ``dataset`` is of another kind.

    Warns
    -----
    UserWarning
        There is not one whole batch, and what is no whole batch is left out: every epoch is empty.
    """
    if not isinstance(dataset, ShardedDataset):
        raise UsageError(
            f"dataset is {type(dataset).__name__}, expected an H5Dataset or NpyDataset; for Subset and others "
            "use torch.utils.data.DataLoader with collate_fn=shardwright.loaders.collate"
        )
    batch_size = whole_number("batch_size", batch_size, 1)
    seed = whole_number("seed", seed, 0, (1 << 63) - 1)
    options = options or LoaderOptions()
    if drop_last and options.uneven not in (None, "drop"):
        raise UsageError(
            f"drop_last is set, and uneven is {options.uneven!r}: expected 'drop', or no drop_last"
        )
    chosen = plan(dataset, batch_size, shuffle, options)
    check_ranks(ranks)
    if options.transform:
        _check_transform(dataset, chosen, options.transform)
    uneven = options.uneven or ("drop" if drop_last else "spread" if not shuffle else None)
    if uneven is None:  # alone, there is nobody to keep step with
        uneven = "pad" if resolved(ranks)[1] > 1 else "spread"
    batches = EpochBatches(dataset, chosen, batch_size, seed=seed, uneven=uneven, ranks=ranks)
    if why := batches.why_empty():
        warnings.warn(why, UserWarning, stacklevel=2)
    return Loader(dataset, batches, collate_fn or collate, options)


def _check_transform(dataset: ShardedDataset, plan: LoaderPlan, transform: BatchTransform) -> None:
    transform.shape(dataset.manifest.image_shape)
    if plan.engine != "threads" or dataset.makes_samples:
        raise UsageError(
            f"LoaderOptions(transform=...) is for the reading threads, and here are {plan.engine} ({plan.why_engine}): "
            "transform batches there, or samples by the Dataset's transform, not both"
        )
    if not dataset.has_images:
        raise UsageError(
            f"transform is given, and no images are among the columns {', '.join(dataset.columns)}"
        )
