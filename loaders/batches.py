"""The batches of an epoch that one rank reads: what a DataLoader calls its batch sampler."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from torch.utils.data import DistributedSampler, Sampler

from shardwright.datasets.base import ShardedDataset
from shardwright.datasets.seeds import SeededIndices
from shardwright.errors import whole_number
from shardwright.loaders.draws import Drawing
from shardwright.loaders.order import Epoch, block_shuffle, exact_shuffle, sequential
from shardwright.loaders.plan import LoaderPlan
from shardwright.loaders.position import Position, position_in
from shardwright.loaders.ranks import Dealing, Share, Uneven, batch_count, in_step, share_of
from shardwright.loaders.transform import BatchTransform, ImageShape
from shardwright.loaders.world import Ranks, resolved


class EpochBatches(Sampler[Any]):
    """The batches of one rank's share of an epoch, as arrays of indices; iterated again, those of the next epoch.

    Attributes
    ----------
    next_epoch, next_batch
        Where the next iteration begins.
    position : Position
        What was handed out, which the loader counts: it may be behind what was drawn here.
    counting : object
        The key of who counts: the iterator begun last. None where the next iteration was set since.
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
        self._dataset = dataset
        self._ranks: int | None = None  # at the start of the epoch that is resumed
        self.position = self.next_position
        self.counting: object = None

    @property
    def rank_and_world(self) -> tuple[int, int]:
        """This rank's number, and how many there are."""
        return resolved(self.ranks, self.part)

    @property
    def dealing(self) -> Dealing:
        """How the next epoch is dealt out."""
        return self._dealing(self.next_position.ranks)

    def _dealing(self, ranks: int) -> Dealing:
        """How an epoch is dealt out that was begun on so many ``ranks``."""
        _, world = self.rank_and_world
        lanes = ranks if self.plan.order == "block" else 1
        dealing = Dealing(self.batch_size * world, self.uneven, lanes, ranks)
        return in_step(self._rows_of_parts, dealing) if self.part else dealing

    def share(self, position: Position) -> Share:
        """This rank's share of the epoch of ``position``, all of it."""
        dealing = self._dealing(position.ranks)
        return share_of(self._order(position.epoch, dealing.lanes), dealing, *self.rank_and_world)

    @property
    def next_position(self) -> Position:
        """Where the next iteration begins."""
        return Position(self.next_epoch, self.next_batch, self._ranks or self.rank_and_world[1])

    def after(self, position: Position) -> Position:
        """The beginning of the epoch after ``position``."""
        return Position(position.epoch + 1, 0, self.rank_and_world[1])

    def next_share(self) -> Share:
        """This rank's share of the next epoch, all of it."""
        return self.share(self.next_position)

    def take_share(self) -> Share:
        """This rank's share of the next epoch; the one after that is the next then."""
        share = self.next_share()
        self.next_epoch, self.next_batch, self._ranks = self.next_epoch + 1, 0, None
        return share

    def seeded(self, indices: Any, epoch: int) -> SeededIndices:
        """Indices of a batch, which seed the generators of random numbers for each of them."""
        return SeededIndices(indices, self.seed, epoch, self._node)

    def drawing(self, transform: BatchTransform, epoch: int, image_shape: ImageShape) -> Drawing:
        """What is drawn for the images of an epoch, which are of ``image_shape``."""
        return Drawing(transform, image_shape, self.seed, epoch, self._node)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch ``epoch``, counted from 0: what is left of it, where it was restored.

        Frameworks call this for the epoch whose state they have just restored: it must stay where it is, or the
        batches before it would silently come a second time.
        """
        epoch = whole_number("epoch", epoch, 0)
        if epoch != self.next_epoch:
            self.next_epoch, self.next_batch, self._ranks = epoch, 0, None
        self.position, self.counting = self.next_position, None

    def state_dict(self) -> dict[str, Any]:
        """Where the next iteration begins, as JSON values; an iterator's own says where that one is.

        Both as `torchdata.stateful_dataloader.StatefulDataLoader` asks for them, with the keys of `Loader`'s.
        """
        return self.described(self.next_position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken, which may be one of a `Loader`.

        Raises
        ------
        UsageError
            The state is of something else: names what.
        """
        plan = self.plan
        shuffled = ("exact", "block")
        if (
            state.get("order") in shuffled
            and plan.order in shuffled
            and type(state.get("mixed_chunks")) is int
        ):
            # The choice may have been another one on another machine; it is kept.
            plan = replace(
                plan, order=state["order"], mixed_chunks=state["mixed_chunks"], why_order="as the state says"
            )
        self.position = restored = position_in(state, self._identity(plan))
        self.plan, self.counting = plan, None
        self.next_epoch, self.next_batch, self._ranks = restored.epoch, restored.batch, restored.ranks

    def described(self, position: Position) -> dict[str, Any]:
        """A state that is at ``position``."""
        return {**self._identity(self.plan), **asdict(position)}

    def _identity(self, plan: LoaderPlan) -> dict[str, Any]:
        """What must be the same for the order to be the same."""
        return {
            "dataset": self._fingerprint,
            "version": self._dataset.version,
            "rows": self._dataset.whole.rows,
            "parts": len(self._rows_of_parts),
            "seed": self.seed,
            "order": plan.order,
            "mixed_chunks": plan.mixed_chunks,
            "global_batch": self.dealing.global_batch,
            "uneven": self.uneven,
        }

    @cached_property
    def _fingerprint(self) -> str:
        # Once: torchdata asks for a state with every batch.
        return self._dataset.whole.fingerprint()

    def _order(self, epoch: int, lanes: int) -> Epoch:
        match self.plan.order:
            case "sequential":
                return sequential(self.blocks, self.plan.mixed_chunks)
            case "exact":
                return exact_shuffle(self.blocks, self.seed, epoch)
            case "block":
                return block_shuffle(self.blocks, self.plan.mixed_chunks, self.seed, epoch, lanes)

    def __iter__(self) -> Iterator[Any]:
        return _Drawn(self)

    def __len__(self) -> int:
        return batch_count(int(self.blocks[-1]), self.dealing)

    def why_empty(self) -> str | None:
        """Why there is no batch in any epoch, and what to do; None where there are some."""
        if len(self):
            return None
        rows, world = min(self._rows_of_parts), self.rank_and_world[1]
        where = f" in the smallest of {len(self._rows_of_parts)} parts" if self.part else ""
        ranks = f" on each of {world} ranks" if world > 1 else ""
        return (
            f"every epoch of this loader is empty: {rows} rows{where} are less than a batch of {self.batch_size}{ranks}"
            ", and what fills no batch is left out (drop_last, or uneven='drop'). Use a smaller batch_size, or leave "
            "drop_last out"
        )


class _Drawn(Iterator[Any]):
    """Takes its share when it is first drawn from: a DataLoader makes two of its first epoch, and draws from one."""

    def __init__(self, batches: EpochBatches) -> None:
        self._batches = batches
        self._share: Share | None = None
        self._at = Position()

    def __next__(self) -> Any:
        share = self._begun() if self._share is None else self._share
        k = self._at.batch
        if k == len(share):
            raise StopIteration
        self._at = replace(self._at, batch=k + 1)
        return self._batches.seeded(share.indices[share.bounds[k] : share.bounds[k + 1]], self._at.epoch)

    def _begun(self) -> Share:
        at = self._batches.next_position
        self._share = self._batches.take_share()
        self._at = replace(at, batch=min(at.batch, len(self._share)))
        return self._share

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict() if self._share is None else self._batches.described(self._at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches.load_state_dict(state)
        self._begun()


class RankSampler(DistributedSampler[int]):
    """The samples of a rank's next epoch, one by one: what frameworks look for as the ``sampler`` of a loader.

    A DistributedSampler, because such a one tells Lightning that sharding is done. Nothing but these methods is of
    that class: the number of ranks may not be known yet.
    """

    def __init__(self, batches: EpochBatches) -> None:
        self._batches = batches

    def set_epoch(self, epoch: int) -> None:
        self._batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self._batches.next_share().indices.tolist())

    def __len__(self) -> int:
        batches = self._batches
        if batches.uneven == "spread":
            return len(batches.next_share().indices)
        return len(batches) * batches.batch_size
