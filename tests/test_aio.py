"""Lists of reads: right bytes, early ends, failures, and systems that have none."""

import ctypes
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from building import build

from shardwright.datasets import aio, open_dataset
from shardwright.datasets.aio import MOST, ReadList
from shardwright.datasets.buffers import RowBuffers
from shardwright.datasets.files import FileCache
from shardwright.errors import UsageError

SIZE = 100

try:
    ReadList()
except OSError:
    pytest.skip("this system has no io_submit", allow_module_level=True)


@pytest.fixture
def content(tmp_path: Path) -> tuple[int, bytes]:
    data = np.random.default_rng(0).bytes(100_000)
    (tmp_path / "file").write_bytes(data)
    return os.open(tmp_path / "file", os.O_RDONLY), data


def read(
    reads: ReadList, fds: list[int], offsets: list[int], buffers: RowBuffers
) -> tuple[list[int], list[bytes]]:
    done = reads.read(np.array(fds), np.array(offsets), buffers.addresses, SIZE)
    return done.tolist(), [buffers[i].tobytes() for i in range(len(buffers))]


@pytest.mark.parametrize("count", [0, 1, MOST, 3 * MOST + 7])
def test_lists_of_any_length(content: tuple[int, bytes], count: int) -> None:
    fd, data = content
    offsets = np.random.default_rng(count).integers(0, len(data) - SIZE, count).tolist()
    done, found = read(ReadList(), [fd] * count, offsets, RowBuffers([np.zeros((count, SIZE), np.uint8)]))
    assert done == [SIZE] * count
    assert found == [data[offset : offset + SIZE] for offset in offsets]


def test_what_is_not_read_whole_is_told_and_the_rest_is_read(content: tuple[int, bytes]) -> None:
    fd, data = content
    closed = os.dup(fd)
    os.close(closed)
    fds = [fd, fd, fd, closed, fd]
    offsets = [5, len(data) - 3, len(data) + 5, 0, 6]
    done, found = read(ReadList(), fds, offsets, RowBuffers([np.zeros((5, SIZE), np.uint8)]))
    assert done[:3] == [SIZE, 3, 0]
    assert done[3] < 0
    assert done[4] < 0  # behind one that could not even be begun
    assert found[0] == data[5 : 5 + SIZE]


def test_an_interrupt_leaves_no_results_for_the_next(content: tuple[int, bytes]) -> None:
    fd, data = content
    reads = ReadList()
    getevents, calls = reads._getevents, 0

    def interrupted(*arguments: object) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        return int(getevents(*arguments))

    reads._getevents = interrupted
    buffers = RowBuffers([np.zeros((2, SIZE), np.uint8)])
    with pytest.raises(KeyboardInterrupt):
        read(reads, [fd, fd], [0, len(data)], buffers)
    assert read(reads, [fd, fd], [7, 9], buffers) == ([SIZE, SIZE], [data[7 : 7 + SIZE], data[9 : 9 + SIZE]])


@pytest.mark.parametrize("order", ["exact", "block"])
@pytest.mark.parametrize("files", [1, 100])
def test_the_same_rows_where_the_system_has_no_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, files: int
) -> None:
    built = build(tmp_path / "set", rows=300, shard_rows=10)
    monkeypatch.setattr(FileCache.__init__, "__defaults__", (files,))
    rows = np.random.default_rng(0).permutation(300)
    with_lists = open_dataset(built.folder).read_batch(rows).columns[0]

    def refused(*arguments: object) -> int:
        ctypes.set_errno(1)
        return -1

    monkeypatch.setattr(aio, "_system_calls", lambda: (refused,) * 4)
    without = open_dataset(built.folder).read_batch(rows).columns[0]
    np.testing.assert_array_equal(with_lists, without)
    np.testing.assert_array_equal(without.permute(0, 2, 3, 1), built.images[rows])


def test_threads_share_no_list(tmp_path: Path) -> None:
    built = build(tmp_path / "set", rows=200, shard_rows=50, flat=0)
    reader = open_dataset(built.folder, verify="off").reader
    wrong: list[int] = []

    def work(seed: int) -> None:
        for rows in np.random.default_rng(seed).integers(0, 200, (50, 64)):
            found = np.zeros((64, reader.row_bytes), np.uint8)
            reader.images(rows, RowBuffers([found]))
            if not np.array_equal(found.reshape(-1, 8, 8, 3), built.images[rows]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 <= len(reader._lists) <= 4


class TestRowBuffers:
    def test_places_in_several_arrays(self) -> None:
        arrays = [np.zeros((2, 4), np.uint8), np.zeros((3, 4), np.uint8)]
        buffers = RowBuffers(arrays, np.array([1, 0, 1]), np.array([2, 1, 0])).part(np.array([2, 0]))
        for i, value in enumerate((7, 8)):
            ctypes.memset(int(buffers.addresses[i]), value, 4)
            assert buffers[i].tolist() == [value] * 4
        assert arrays[1].tolist() == [[7] * 4, [0] * 4, [8] * 4]

    @pytest.mark.parametrize(
        "arrays",
        [
            [np.zeros((2, 4), np.uint16)],
            [np.zeros((2, 4), np.uint8), np.zeros((2, 5), np.uint8)],
            [np.zeros((4, 2), np.uint8).T],
            [np.frombuffer(b"12345678", np.uint8).reshape(2, 4)],
        ],
    )
    def test_refuses_what_addresses_would_not_fit(self, arrays: list[np.ndarray]) -> None:
        with pytest.raises(UsageError, match="buffer"):
            RowBuffers(arrays)

    def test_refuses_rows_outside(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="outside"):
            RowBuffers([np.zeros((2, 4), np.uint8)], np.array([0]), np.array([2]))
        with pytest.raises(UsageError, match="outside"):
            RowBuffers([np.zeros((5, 4), np.uint8), np.zeros((2, 4), np.uint8)], np.ones(5, int))
        with pytest.raises(UsageError, match="go together"):
            RowBuffers([np.zeros((2, 4), np.uint8)], np.array([1, 0]), np.array([0, 0]))
        reader = open_dataset(build(tmp_path / "set").folder).reader
        with pytest.raises(UsageError, match="buffers of 2 rows of 4 bytes, expected 3 of 192"):
            reader.images(np.arange(3), RowBuffers([np.zeros((2, 4), np.uint8)]))
