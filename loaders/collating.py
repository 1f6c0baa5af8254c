"""From samples to a batch."""

from typing import Any

from torch.utils.data import default_collate

from shardwright.datasets.base import SampleBatch


def collate(samples: Any) -> Any:
    """Make a batch: a `SampleBatch` gives its columns as they are, a list goes to torch's default_collate.

    For a stock DataLoader too: ``DataLoader(dataset, batch_size, collate_fn=shardwright.loaders.collate)``.
    """
    if isinstance(samples, SampleBatch):
        return samples.columns
    return default_collate(samples)
