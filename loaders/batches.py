"""The batches of an epoch that one rank reads: what a DataLoader calls its batch sampler."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from shardwright.datasets.base import ShardedDataset
from shardwright.datasets.rows import Index
from shardwright.datasets.seeds import SeededIndices
from shardwright.loaders.draws import Drawing
from shardwright.loaders.order import Epoch, block_shuffle, exact_shuffle, sequential
from shardwright.loaders.plan import LoaderPlan
from shardwright.loaders.ranks import Dealing, Share, Uneven, batch_count, in_step, share_of
from shardwright.loaders.transform import BatchTransform, ImageShape
from shardwright.loaders.world import Ranks, resolved


class EpochBatches(Sampler[Any]):
    """The batches of one rank's share of an epoch, as arrays of indices; iterated again, those of the next epoch.

    Attributes
    ----------
    next_epoch, next_batch
        Where the next iteration begins.
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        plan: LoaderPlan,
        batch_size: int,
        *,
        seed: int,
        uneven: Uneven,
        ranks: Ranks = None,
    ) -> None:
        self.plan, self.batch_size, self.seed, self.uneven = plan, batch_size, seed, uneven
        self.ranks, self.part = ranks, dataset.part
        nodes = dataset.part[1] if dataset.part else 1
        self._rows_of_parts = [dataset.whole.part(node, nodes).rows for node in range(nodes)]
        self._node = dataset.part[0] if dataset.part else 0  # indices count in the part alone
        #: Where chunks begin, in indices.
        self.blocks = dataset.reader.rows.blocks(dataset.manifest.chunk_rows)
        self.next_epoch = self.next_batch = 0
        self._lanes: int | None = None  # of the epoch that is resumed

    @property
    def rank_and_world(self) -> tuple[int, int]:
        """This rank's number, and how many there are."""
        return resolved(self.ranks, self.part)

    @property
    def dealing(self) -> Dealing:
        """How the next epoch is dealt out."""
        _, world = self.rank_and_world
        return self._dealing(1 if self.plan.order != "block" else self._lanes or world)

    def _dealing(self, lanes: int) -> Dealing:
        _, world = self.rank_and_world
        dealing = Dealing(self.batch_size * world, self.uneven, lanes)
        return in_step(self._rows_of_parts, dealing) if self.part else dealing

    def take_share(self) -> Share:
        """This rank's share of the next epoch; the one after that is the next then."""
        share = share_of(self._order(self.next_epoch, self.dealing.lanes), self.dealing, *self.rank_and_world)
        self.next_epoch, self.next_batch, self._lanes = self.next_epoch + 1, 0, None
        return share

    def seeded(self, indices: Any, epoch: int) -> SeededIndices:
        """Indices of a batch, which seed the generators of random numbers for each of them."""
        return SeededIndices(indices, self.seed, epoch, self._node)

    def drawing(self, transform: BatchTransform, epoch: int, image_shape: ImageShape) -> Drawing:
        """What is drawn for the images of an epoch, which are of ``image_shape``."""
        return Drawing(transform, image_shape, self.seed, epoch, self._node)

    def indices_from(self, epoch: int, first: int, lanes: int) -> Iterator[Index]:
        """The indices of each batch of an epoch dealt out in ``lanes``, from batch ``first`` on."""
        share = share_of(self._order(epoch, lanes), self._dealing(lanes), *self.rank_and_world)
        for k in range(first, len(share)):
            yield share.indices[share.bounds[k] : share.bounds[k + 1]].astype(np.int64)

    def resume(self, epoch: int, batch: int, lanes: int) -> None:
        """Begin the next iteration in the middle of an epoch that was begun on ``lanes`` ranks."""
        self.next_epoch, self.next_batch, self._lanes = epoch, batch, lanes

    def _order(self, epoch: int, lanes: int) -> Epoch:
        match self.plan.order:
            case "sequential":
                return sequential(self.blocks, self.plan.mixed_chunks)
            case "exact":
                return exact_shuffle(self.blocks, self.seed, epoch)
            case "block":
                return block_shuffle(self.blocks, self.plan.mixed_chunks, self.seed, epoch, lanes)

    def __iter__(self) -> Iterator[Any]:
        # A generator: DataLoader makes two iterators of its first epoch, and draws from one.
        epoch, first = self.next_epoch, self.next_batch
        share = self.take_share()
        for k in range(first, len(share)):
            yield self.seeded(share.indices[share.bounds[k] : share.bounds[k + 1]], epoch)

    def __len__(self) -> int:
        return batch_count(int(self.blocks[-1]), self.dealing)
