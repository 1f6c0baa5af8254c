"""Which rank this process is."""

from typing import Literal

import torch.distributed

from shardwright.errors import UsageError

Ranks = Literal["auto"] | tuple[int, int] | None


def resolved(ranks: Ranks) -> tuple[int, int]:
    """(rank, world) that ``ranks`` comes to now; (0, 1) for one process, and where sharding is left to others."""
    if ranks == "auto":
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1
    return (0, 1) if ranks is None else ranks


def check_ranks(ranks: object) -> None:
    """Refuse what is no choice of ranks.

    Raises
    ------
    UsageError
        It is neither ``"auto"`` nor None nor (rank, world) with 0 <= rank < world.
    """
    if ranks is None or ranks == "auto":
        return
    match ranks:
        case (int(rank), int(world)) if 0 <= rank < world:
            return
    raise UsageError(f"ranks is {ranks!r}, expected 'auto', None, or (rank, world) with 0 <= rank < world")
