"""Which rank this process is."""

from typing import Literal

import torch.distributed

from shardwright.errors import UsageError

Ranks = Literal["auto"] | tuple[int, int] | None


def resolved(ranks: Ranks, part: tuple[int, int] | None = None) -> tuple[int, int]:
    """(rank, world) that ``ranks`` comes to now; (0, 1) for one process, and where sharding is left to others.

    With a ``part`` (node, nodes) ranks count inside the node.

    Raises
    ------
    UsageError
        The ranks of torch.distributed are not as many on each node, numbered node by node.
    """
    if ranks == "auto":
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return 0, 1
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        node, nodes = part or (0, 1)
        if world % nodes or rank // (world // nodes) != node:
            raise UsageError(
                f"rank {rank} of {world} reads part {node} of {nodes}, expected ranks numbered node by node, as many "
                "on each: give make_loader ranks=(rank in the node, ranks of the node)"
            )
        return rank % (world // nodes), world // nodes
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
