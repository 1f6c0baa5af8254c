"""Workers that die, hang or hand over what they must not: an error in seconds that names it, and nobody is left."""

import gc
import multiprocessing
import os
import re
import resource
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from building import Built, Deed, as_floats, build, unpicklable

from shardwright.datasets import open_dataset
from shardwright.datasets.reader import Reader
from shardwright.errors import UsageError, WorkerError
from shardwright.loaders import Loader, LoaderOptions, WorkerMemory, handover, make_loader
from shardwright.loaders.descriptors import descriptor_shortage
from shardwright.loaders.handover import mb, shared_bytes, shortage
from shardwright.loaders.stacks import state_of


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("workers") / "set", rows=64)


def loader_of(
    built: Built, transform: Any = None, batch_size: int = 4, workers: int = 2, **options: Any
) -> Loader:
    dataset = open_dataset(built.folder, transform=transform)
    chosen = LoaderOptions(engine="processes", workers=workers, quiet=True, **options)
    return make_loader(dataset, batch_size, options=chosen)


@pytest.fixture(autouse=True)
def nobody_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, and no folder of stacks."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.collect()
    before = set(multiprocessing.active_children())
    yield
    gc.collect()
    assert set(multiprocessing.active_children()) - before == set()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("shardwright-")] == []


def error_of(loader: Any, seconds: float = 10.0) -> WorkerError:
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        list(loader)
    assert time.monotonic() - start < seconds
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(("deed", "said"), [
    ("signal SIGKILL", r"was killed by signal 9 \(SIGKILL\), most likely .* memory ran out: take fewer workers "
     r"\(here 2\) or a smaller prefetch_batches \(here 3\)"),
    ("signal SIGBUS", r"was killed by signal 7 \(SIGBUS\), most likely because /dev/shm is full: .*--shm-size"),
    ("signal SIGSEGV", r"was killed by signal 11 \(SIGSEGV\): native code .* crashed"),
    ("signal SIGTERM", r"was killed by signal 15 \(SIGTERM\), which somebody sent"),
    ("exit 0", "ended by itself with exit code 0"),
    ("exit 3", "ended by itself with exit code 3"),
])  # fmt: skip
def test_a_worker_that_ends_is_named(built: Built, deed: str, said: str) -> None:
    loader = loader_of(built, Deed(deed, when=9))
    error = error_of(loader)
    assert re.search(rf"worker process \d+ {said}", str(error)), error
    assert loader.worker_memory() == []


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_ends_however_it_was_started(built: Built, method: Any) -> None:
    loader = loader_of(built, Deed("signal SIGKILL", when=9), start_method=method)
    assert "killed by signal 9 (SIGKILL)" in str(error_of(loader, 60))


def test_a_worker_that_is_killed_while_the_loop_computes(built: Built) -> None:
    """The error comes where the next batch is asked for, not in the middle of the loop's own work."""
    loader = loader_of(built)
    batches = iter(loader)
    next(batches)
    pid = loader.worker_memory()[0].pid
    os.kill(pid, 9)
    time.sleep(1)  # torch's handler of SIGCHLD would raise here
    assert str(pid) in str(error_of(batches))
    with pytest.raises(WorkerError, match=str(pid)):
        next(batches)
    assert [len(labels) for _, labels in loader] == [4] * 16  # others are started


def test_a_worker_that_is_killed_between_two_epochs(built: Built) -> None:
    loader = loader_of(built)
    list(loader)
    os.kill(loader.worker_memory()[1].pid, 9)
    assert "signal 9" in str(error_of(loader))
    assert len(list(loader)) == 16


def test_workers_end_at_once_where_an_epoch_is_left(built: Built) -> None:
    loader = loader_of(built, Deed("cuda", when=9), prefetch_batches=1)
    batches = iter(loader)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    cycle: list[Any] = [loader, batches]
    cycle.append(cycle)
    start = time.monotonic()
    del loader, batches, cycle
    gc.collect()
    assert time.monotonic() - start < 3
    assert multiprocessing.active_children() == []


def test_torchs_own_error_is_the_cause(built: Built) -> None:
    loader = loader_of(built, Deed("sleep", when=12), workers=1)
    batches = iter(loader)
    next(batches)
    pid = loader.worker_memory()[0].pid
    threading.Timer(1.0, os.kill, (pid, 9)).start()
    error = error_of(batches)
    assert type(error.__cause__) is RuntimeError
    assert f"DataLoader worker (pid {pid}) is killed by signal" in str(error.__cause__)


def test_iterating_in_another_thread(built: Built) -> None:
    found: list[Any] = []

    def run() -> None:
        try:
            list(loader_of(built, Deed("signal SIGKILL", when=9)))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert [type(error) for error in found] == [WorkerError]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_tensor_of_a_device_is_refused_in_the_worker(built: Built, method: Any) -> None:
    error = error_of(loader_of(built, Deed("device"), start_method=method), 60)
    assert "made a tensor on the device 'meta'" in str(error)
    assert "return CPU tensors" in str(error)


@pytest.mark.parametrize("batch", [{"a": [torch.zeros(2)], "b": (1, torch.zeros(1, device="meta"))}])
def test_a_device_is_found_wherever_it_is(batch: Any) -> None:
    assert isinstance(handover.OnCpu(lambda samples: batch)([]), handover.Refused)
    del batch["b"]
    assert handover.OnCpu(lambda samples: batch)([]) is batch


def test_cuda_in_a_forked_worker(built: Built) -> None:
    error = error_of(loader_of(built, Deed("cuda")))
    assert "used CUDA: return CPU tensors" in str(error)
    assert "start_method='spawn'" in str(error)
    assert "Cannot re-initialize CUDA" in str(error.__cause__)


def test_a_batch_that_cannot_be_sent_is_not_waited_for(built: Built) -> None:
    dataset = open_dataset(built.folder)
    options = LoaderOptions(engine="processes", workers=1, quiet=True)
    error = error_of(make_loader(dataset, 4, collate_fn=unpicklable, options=options))
    assert "cannot hand over a batch" in str(error)
    assert "let collate_fn return what can be pickled" in str(error)


class Limit:
    """A transform that first takes something from its process."""

    def __init__(self, what: int, most: int) -> None:
        self.what, self.most = what, most

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        resource.setrlimit(self.what, (self.most, resource.getrlimit(self.what)[1]))
        return image


def take_first(samples: Any) -> Any:
    """A collate function whose batch is not in shared memory yet."""
    return samples[0][0].clone()


@pytest.mark.parametrize(("limit", "said"), [
    (Limit(resource.RLIMIT_FSIZE, 0), "cannot hand over a batch through /dev/shm, where .* are free .*--shm-size"),
    (Limit(resource.RLIMIT_NOFILE, 3), "cannot hand over a batch, as too many files are open .*ulimit -n"),
])  # fmt: skip
def test_no_room_to_hand_over_is_said(built: Built, limit: Limit, said: str) -> None:
    dataset = open_dataset(built.folder, transform=limit)
    options = LoaderOptions(engine="processes", workers=1, quiet=True)
    with pytest.raises(WorkerError, match=said):
        list(make_loader(dataset, 4, collate_fn=take_first, options=options))


def test_too_few_files_here_to_receive(built: Built) -> None:
    loader = loader_of(built, workers=1)
    batches = iter(loader)
    next(batches)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
    try:
        with pytest.raises(WorkerError, match="too many files are open to receive a batch .*ulimit -n"):
            list(batches)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_hangs_says_where(built: Built, method: Any) -> None:
    seconds = 1.0 if method == "fork" else 10.0
    loader = loader_of(built, Deed("sleep"), timeout_seconds=seconds, start_method=method)
    error = error_of(loader, seconds + 8)
    assert f"no batch within timeout_seconds={seconds:g}: worker process " in str(error)
    assert str(error).count(" is sleeping, at sleep_for_long (building.py:") == 2
    assert "in __call__ (building.py" in str(error)


def test_a_worker_that_is_stopped_is_killed(built: Built) -> None:
    loader = loader_of(built, timeout_seconds=1.0)
    batches = iter(loader)
    next(batches)
    pid = loader.worker_memory()[0].pid
    os.kill(pid, 19)
    error = error_of(batches)
    assert f"worker process {pid} is stopped" in str(error)
    assert not psutil.pid_exists(pid)
    assert state_of(pid) == "gone"


def test_a_worker_that_is_slow_but_in_time(built: Built) -> None:
    loader = loader_of(built, timeout_seconds=30.0)
    for _ in range(2):
        assert len(list(loader)) == 16


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("shardwright-read")]


def test_a_thread_that_hangs_says_where(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on, images = threading.Event(), Reader.images

    def hang(self: Reader, index: Any, *arguments: Any, **options: Any) -> None:
        if 40 in index:
            going_on.wait()
        images(self, index, *arguments, **options)

    monkeypatch.setattr(Reader, "images", hang)
    options = LoaderOptions(engine="threads", workers=2, timeout_seconds=0.5, quiet=True)
    error = error_of(make_loader(open_dataset(built.folder), 4, options=options), 5)
    going_on.set()
    assert "no batch within timeout_seconds=0.5: shardwright-read-0: " in str(error)
    assert "in hang (test_workers.py:" in str(error)
    assert "get" in str(error) or "_work (threads.py:" in str(error)
    end = time.monotonic() + 5
    while readers() and time.monotonic() < end:
        time.sleep(0.01)
    assert readers() == []


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_timeout_out_of_range(seconds: float) -> None:
    with pytest.raises(UsageError, match="timeout_seconds is .*, expected more than 0"):
        LoaderOptions(timeout_seconds=seconds)


def test_shared_memory_that_is_needed() -> None:
    assert shared_bytes(2, 3, 10_000_000) == 80_000_000
    assert shortage(2, 3, 10_000_000, 80_000_000) is None
    assert shortage(2, 3, 10_000_000, None) is None
    said = shortage(2, 3, 10_000_000, 64_000_000)
    assert said is not None
    assert "80.0 MB of /dev/shm, and 64.0 MB are free: give it more (docker run --shm-size" in said


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what is free of shared memory."""

    def set_free(size: int) -> None:
        monkeypatch.setattr("shardwright.loaders.loader.free_shared_bytes", lambda: size)

    return set_free


def test_too_little_shared_memory_is_said_before_workers_start(
    built: Built, free: Callable[[int], None]
) -> None:
    needed = shared_bytes(2, 3, 4 * (8 * 8 * 3 + 8))
    free(needed - 1)
    for _ in range(2):
        with pytest.raises(UsageError, match=rf"need {mb(needed)} of /dev/shm, and .* are free"):
            next(iter(loader_of(built)))
    assert multiprocessing.active_children() == []
    free(needed)
    assert len(list(loader_of(built))) == 16
    free(0)
    assert len(list(make_loader(open_dataset(built.folder), 4))) == 16  # threads hand nothing over
    labels = open_dataset(built.folder, columns=("label",))
    assert len(list(make_loader(labels, 4, options=LoaderOptions(engine="processes", workers=1)))) == 16


def test_batches_that_turn_out_larger_are_said_once(built: Built, free: Callable[[int], None]) -> None:
    stored = 4 * (8 * 8 * 3 + 8)
    free(2 * shared_bytes(2, 3, stored))
    loader = loader_of(built, as_floats)
    with pytest.warns(
        UserWarning, match="batches are larger than the images stored: 2 workers .* need"
    ) as found:
        list(loader)
    list(loader)
    assert len(found) == 1
    assert found[0].filename == __file__
    free(5 * shared_bytes(2, 3, stored))
    list(loader_of(built, as_floats))
    free(1000)  # nobody knows yet how large its samples are: it is only warned of
    with pytest.warns(UserWarning, match="if batches are as large as the images stored: 2 workers"):
        list(loader_of(built, Deed("nothing")))


def test_free_shared_memory_is_asked_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(handover, "_SHARED_MEMORY", str(tmp_path))
    assert (handover.free_shared_bytes() or 0) > 0
    monkeypatch.setattr(handover, "_SHARED_MEMORY", str(tmp_path / "none"))
    assert handover.free_shared_bytes() is None
    monkeypatch.setattr("sys.platform", "darwin")
    assert handover.free_shared_bytes() is None


def test_too_few_descriptors_are_said_once(tmp_path: Path) -> None:
    dataset = open_dataset(build(tmp_path / "set", rows=120, shard_rows=2, chunk_rows=2).folder)
    for allowed in (240, 1024, resource.RLIM_INFINITY):
        assert descriptor_shortage(dataset, workers=0, prefetch_batches=3, allowed=allowed) is None
    said = descriptor_shortage(dataset, workers=0, prefetch_batches=3, allowed=239)
    assert said is not None
    assert "only 59 of 60 shards are kept open" in said
    assert "raise the limit of 239 (`ulimit -n`) to 240" in said
    said = descriptor_shortage(dataset, workers=30, prefetch_batches=3, allowed=400)
    assert said is not None
    assert (
        "hand over 240 tensors, which takes some 424 open files: raise the limit of 400 (`ulimit -n`)" in said
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 70, hard))
    try:
        loader = make_loader(dataset, 8)
        with pytest.warns(UserWarning, match=r"shards are kept open at once, .*ulimit -n") as found:
            list(loader)
        list(loader)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != soft  # a library raises no limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(found) == 1
    assert found[0].filename == __file__


def test_memory_of_workers_is_flat(tmp_path: Path) -> None:
    """A million rows as a list of objects would be some 100 MB, copied into each worker as it is touched."""
    built = build(tmp_path / "set", rows=30_000, shard_rows=10_000, chunk_rows=1000, shape=(1, 1, 1))
    loader = make_loader(
        open_dataset(built.folder, transform=as_floats),
        500,
        shuffle=True,
        options=LoaderOptions(engine="processes", workers=2, start_method="forkserver", quiet=True),
    )
    assert loader.worker_memory() == []
    held = []
    for _ in range(5):
        for k, _ in enumerate(loader):
            if k == 30:
                memory = loader.worker_memory()
                held.append([worker.own_bytes for worker in memory])
    assert len({worker.pid for worker in memory}) == 2
    assert all(
        isinstance(worker, WorkerMemory) and worker.rss_bytes > worker.own_bytes > 0 for worker in memory
    )
    # The first epoch reads labels and checksums; from then on a leak of ten bytes a row would be seen.
    grown = np.array(held[-1]) - np.array(held[1])
    assert (grown < 10 * 30_000 * 3).all(), held


def test_memory_of_threads_is_that_of_this_process(built: Built) -> None:
    with warnings.catch_warnings():
        assert [m.pid for m in make_loader(open_dataset(built.folder), 4).worker_memory()] == [os.getpid()]


class Noting:
    """A `worker_init_fn` that leaves a file for each call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker: int) -> None:
        (self.folder / f"{worker} in {os.getpid()}").touch(exist_ok=False)


@pytest.mark.parametrize("patience", [None, 60.0])
def test_what_each_process_does_first(built: Built, tmp_path: Path, patience: float | None) -> None:
    """Once in each, over all epochs; and in those that are started after a death."""
    loader = loader_of(built, timeout_seconds=patience)
    loader.worker_init_fn = Noting(tmp_path)
    for _ in range(2):
        assert len(list(loader)) == 16
    first = sorted(path.name for path in tmp_path.glob("* in *"))
    assert [name[:2] for name in first] == ["0 ", "1 "]
    psutil.Process(int(first[0].rpartition(" ")[2])).kill()
    error_of(loader)
    assert len(list(loader)) == 16
    assert len(list(tmp_path.glob("* in *"))) == 4
    del loader
    threads = make_loader(open_dataset(built.folder), 4)
    threads.worker_init_fn = Noting(tmp_path)
    assert len(list(threads)) == 16
    assert len(list(tmp_path.glob("* in *"))) == 4
