"""Reading ahead by threads: whose a batch is, what stays behind, what a failure says."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from building import Built, build, recorded_reads

from shardwright.datasets import open_dataset
from shardwright.errors import ShardError
from shardwright.loaders import Loader, LoaderOptions, make_loader
from shardwright.loaders.pool import Pool


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("shardwright-read")]


def open_files(folder: Path) -> list[str]:
    links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return [target for link in links if (target := os.path.realpath(link)).startswith(str(folder))]


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "set", rows=400, shard_rows=80)


def loader_of(built: Built, order: Any = "block", batch_size: int = 16, **options: Any) -> Loader:
    dataset = open_dataset(built.folder)
    return make_loader(
        dataset,
        batch_size,
        shuffle=True,
        options=LoaderOptions(workers=2, shuffle_by=order, quiet=True, **options),
    )


@pytest.mark.parametrize("order", ["exact", "block"])
def test_all_batches_of_two_epochs_kept_hold_their_pixels(built: Built, order: str) -> None:
    loader = loader_of(built, order)
    known = {image.tobytes(): int(label) for image, label in zip(built.images, built.labels, strict=True)}
    kept = [batch for _ in range(2) for batch in loader]
    pixels = [(image.tobytes(), int(label)) for images, labels in kept
              for image, label in zip(images.permute(0, 2, 3, 1).numpy(), labels, strict=True)]  # fmt: skip
    assert len(pixels) == 800
    assert all(known[image] == label for image, label in pixels)


def test_a_view_keeps_its_batch(built: Built) -> None:
    loader = loader_of(built, "exact")
    views = [images[3, 1] for images, _ in loader]
    copies = [view.clone() for view in views]
    for _ in loader:  # would write over buffers that came back too early
        pass
    assert all(torch.equal(view, copy) for view, copy in zip(views, copies, strict=True))


def test_a_chunk_is_read_once_an_epoch_in_block_order(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(built, "block", 24)
    list(loader)
    read = recorded_reads(monkeypatch)
    list(loader)
    assert len(set(read)) == len(read)
    assert sum(size for _, _, size in read) <= sum(shard.files[0].bytes for shard in built.manifest.shards)


def test_no_more_is_read_ahead_than_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path / "set", rows=200, flat=0)
    options = LoaderOptions(workers=2, shuffle_by="exact", prefetch_batches=2, quiet=True)
    loader = make_loader(open_dataset(built.folder), 10, shuffle=True, options=options)
    list(loader)
    read = recorded_reads(monkeypatch)
    batches = iter(loader)
    next(batches)
    end = time.monotonic() + 5
    while len(read) < 30 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(read) == 30  # the one handed out, and two


@pytest.mark.parametrize("order", ["exact", "block"])
def test_nothing_stays_behind(built: Built, order: str) -> None:
    loader = loader_of(built, order)
    for _ in loader:
        break
    assert readers() == []
    with pytest.raises(ZeroDivisionError):
        any(1 / 0 for _ in loader)
    gc.collect()
    assert readers() == []
    iterator = iter(loader)
    next(iterator)
    assert len(readers()) == 2
    del iterator
    assert readers() == []
    assert open_files(built.folder) != []
    del loader
    gc.collect()
    assert open_files(built.folder) == []


def test_two_loops_at_once(built: Built) -> None:
    loader = loader_of(built, "exact")
    for (first, a), (second, b) in zip(loader, loader, strict=True):
        assert not torch.equal(first, second)
        assert len(a) == len(b)
    assert readers() == []


def test_memory_is_flat(built: Built) -> None:
    loader = loader_of(built, "block", mixed_chunks=2)
    for _ in range(20):
        for images, _ in loader:
            last = weakref.ref(images.untyped_storage())
    del images
    gc.collect()
    assert last() is None
    assert len(loader._pool._free) <= 7  # three ahead, the one looked at, the one that comes back, two groups


def test_a_pool_gives_a_buffer_again_when_the_last_view_is_gone() -> None:
    pool = Pool(1000, spare=1)
    tensor, array = pool.take((2, 3, 4, 5))
    address = array.ctypes.data
    view = tensor[1].permute(2, 0, 1)[0]
    del tensor, array
    other = pool.take((2, 3, 4, 5))[0]
    assert other.data_ptr() != address
    del view
    assert pool.take((1, 3, 4, 5))[0].data_ptr() == address


@pytest.mark.parametrize("order", ["exact", "block"])
def test_damage_is_raised_where_its_batch_is_due(built: Built, order: str) -> None:
    file = built.folder / built.manifest.shards[2].files[0].name
    loader = loader_of(built, order, 8)
    file.write_bytes(b"\0" * file.stat().st_size)
    batches = iter(loader)
    for _ in range(2):  # whoever catches it does not take the epoch for over
        with pytest.raises(ShardError, match=file.name):
            list(batches)
    assert loader.state_dict()["epoch"] == 0
    assert readers() == []


def test_a_file_cut_short_while_reading(built: Built) -> None:
    loader = loader_of(built, "exact", 8)
    list(loader)
    os.truncate(built.folder / built.manifest.shards[0].files[0].name, 3000)
    with pytest.raises(ShardError, match=r"000001-00000.h5'.* ends before"):
        list(loader)


def test_a_file_written_over_while_reading(built: Built) -> None:
    names = [built.folder / shard.files[0].name for shard in built.manifest.shards[:2]]
    dataset = open_dataset(built.folder)
    dataset[0]
    data = names[1].read_bytes().ljust(names[0].stat().st_size, b"\0")[: names[0].stat().st_size]
    with open(names[0], "r+b") as file:
        file.write(data)
    with pytest.raises(ShardError, match="000001-00000"):
        list(make_loader(dataset, 8))


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_transform_that_raises_names_the_sample(built: Built, engine: Any) -> None:
    def odd(image: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("no")

    dataset = open_dataset(built.folder, transform=odd)
    with pytest.raises(ZeroDivisionError) as caught:
        list(make_loader(dataset, 4, options=LoaderOptions(engine=engine, workers=1)))
    said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert f"while transforming sample 0, '{built.ids[0]}'" in said


def test_ctrl_c_ends_it(built: Built) -> None:
    code = f"""
import time
from shardwright.datasets import open_dataset
from shardwright.loaders import LoaderOptions, make_loader
loader = make_loader(open_dataset({str(built.folder)!r}), 8, options=LoaderOptions(workers=2))
while True:
    for batch in loader:
        print("reading", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert said.rstrip().endswith(b"KeyboardInterrupt")
    assert b"ShardError" not in said


def test_the_choice_is_said_once(built: Built, capfd: pytest.CaptureFixture[str]) -> None:
    loader = make_loader(open_dataset(built.folder), 8, shuffle=True)
    list(loader)
    list(loader)
    said = capfd.readouterr().err
    assert said.count("shardwright: order: block") == 1
    assert "chunks are compressed" in said


def test_raw_rows_that_fit_memory_are_shuffled_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(build(tmp_path / "set", flat=0).folder)
    assert make_loader(dataset, 8, shuffle=True).plan.order == "exact"
    monkeypatch.setattr("shardwright.loaders.plan.memory_bytes", lambda: 10_000)
    assert make_loader(dataset, 8, shuffle=True).plan.order == "block"
    fast = LoaderOptions(fast_random_storage=True)
    assert make_loader(dataset, 8, shuffle=True, options=fast).plan.order == "exact"


def test_cold_files_are_read_all_the_same(built: Built) -> None:
    loader = loader_of(built, "exact")
    for shard in built.manifest.shards:
        fd = os.open(built.folder / shard.files[0].name, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    dataset: Any = loader.dataset
    dataset.reader.will_need(np.arange(400))
    assert sum(len(labels) for _, labels in loader) == 400
    assert not dataset.reader.will_need(np.arange(400))


def test_torchs_threads_of_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading threads use one each; this thread, and those that begin later, have what they had."""
    dataset = open_dataset(build(tmp_path / "set").folder)
    found: list[int] = []

    def collate_fn(batch: Any) -> Any:
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        return batch.columns

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    real = torch.set_num_threads

    def slow(number: int) -> None:
        real(number)
        time.sleep(0.05)

    monkeypatch.setattr(torch, "set_num_threads", slow)
    try:
        loader = make_loader(dataset, 8, collate_fn=collate_fn, options=LoaderOptions(workers=2))
        inside = []
        images = dataset.reader.images

        def spied(*args: Any, **kwargs: Any) -> None:
            inside.append(torch.get_num_threads())
            images(*args, **kwargs)

        dataset.reader.images = spied  # type: ignore[method-assign]
        list(loader)
        assert set(inside) == {1}
        assert set(found) == {3}
        assert torch.get_num_threads() == 3
    finally:
        real(before)


def test_pinned_memory_that_is_kept_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held = 0
    pool = Pool(1000, spare=3, pinned=True, pinned_stats=lambda: {"active_bytes.current": held})
    assert pool.expected_pinned_bytes == 3 * 1024
    held = 2 * 3 * 1024
    assert list(pool.watched(iter([1, 2]))) == [1, 2]
    held += 1
    with pytest.warns(
        UserWarning, match=r"page-locked memory are held, .* batches are kept, .*images.clone\(\)"
    ):
        assert list(pool.watched(iter([1, 2]))) == [1, 2]
    assert list(pool.watched(iter([1, 2]))) == [1, 2]


def test_memory_that_is_not_pinned_is_not_watched() -> None:
    def unasked() -> dict[str, int]:
        raise AssertionError

    assert list(Pool(1000, spare=3, pinned_stats=unasked).watched(iter([1]))) == [1]


def test_a_loader_watches_what_it_pins(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(built)
    asked: list[int] = []
    monkeypatch.setattr(loader._pool, "pinned", True)
    monkeypatch.setattr(
        loader._pool, "take", lambda shape, dtype: (t := torch.empty(shape, dtype=dtype), t.numpy())
    )
    monkeypatch.setattr(loader._pool, "_pinned_stats", lambda: asked.append(1) or {})
    list(loader)
    list(loader)
    assert len(asked) == 2
