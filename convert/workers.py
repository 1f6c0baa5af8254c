"""The worker processes of a conversion: how they start, what they hand back, that they end."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import joblib
from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from shardwright.convert.options import ConvertOptions
from shardwright.convert.orphan import end_with_parent
from shardwright.convert.write import ShardRecord, ShardTask, write_shard
from shardwright.errors import ShardwrightError

# A worker decodes one picture at a time: more threads a worker would only get in each other's way.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@contextmanager
def workers(options: ConvertOptions) -> Iterator[Callable[[ShardTask], "Future[ShardRecord]"]]:
    """Processes of joblib's loky that write shards; they end with the context, whatever ended it."""
    executor = ProcessPoolExecutor(
        max_workers=options.jobs or joblib.cpu_count(),
        env=_ONE_THREAD,
        initializer=end_with_parent,
        initargs=(os.getpid(),),
    )
    try:
        yield lambda task: executor.submit(write_shard, task)
    finally:
        executor.shutdown(wait=True, kill_workers=True)


def result_of(future: "Future[ShardRecord]") -> ShardRecord:
    """What a worker made of its task; raises what kept it from that."""
    try:
        record = future.result()
    except TerminatedWorkerError as error:
        raise ShardwrightError(
            f"a worker process ended while it converted (out of memory, or a crash in a decoder): {error}"
        ) from error
    if record.error is not None:
        raise OSError(*record.error)
    return record
