"""The contract of a shard writer, over both formats; and of the file that a full disk does not break."""

import errno
import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from drawing import Pixels, noise

from shardwright.convert import guard
from shardwright.convert.guard import GuardedFile
from shardwright.convert.options import StoreOptions
from shardwright.convert.store import ShardWriter, shard_file, shard_writer
from shardwright.datasets.layout import Storage

SHAPE = (8, 8, 3)
CHUNK = 8


def images(rows: int) -> Pixels:
    """Noise in the even chunks, flat pictures in the odd ones."""
    found = np.stack([noise(8, 8, k) for k in range(rows)]) if rows else np.empty((0, *SHAPE), np.uint8)
    for k in range(rows):
        if k // CHUNK % 2:
            found[k] = k
    return found


def columns(rows: int) -> dict[str, npt.NDArray[Any]]:
    return {
        "label": np.arange(rows, dtype=np.int64),
        "id": np.array([f"ä/{k}.jpg" for k in range(rows)], object),
        "crc32": np.arange(rows, dtype=np.uint32) + (1 << 31),
        "source_sha256": np.arange(rows * 32, dtype=np.int64).astype(np.uint8).reshape(rows, 32),
        "source_shape": np.arange(rows * 2, dtype=np.int32).reshape(rows, 2),
    }


def write(writer: ShardWriter, pixels: Pixels, chunk_rows: int = CHUNK) -> None:
    """Hand all rows over, as a conversion does."""
    for start in range(0, len(pixels), chunk_rows):
        part = pixels[start : start + chunk_rows]
        writer.write(np.concatenate([part, np.zeros((chunk_rows - len(part), *SHAPE), np.uint8)]), len(part))


class WriterContract:
    format: ClassVar[Storage]
    endings: ClassVar[set[str]]

    def writer(self, folder: Path, planned: int, **options: Any) -> ShardWriter:
        return shard_writer(
            folder / "000001-00000", planned, SHAPE, StoreOptions(self.format, CHUNK, **options)
        )

    def read(self, files: Mapping[str, Path]) -> dict[str, Any]:
        """All columns, by nothing of ours."""
        raise NotImplementedError

    @pytest.mark.parametrize(
        ("planned", "rows"),
        [(20, 20), (16, 16), (20, 19), (20, 16), (20, 13), (20, 8), (20, 3), (3, 3), (1, 1), (3, 2)],
    )
    def test_what_is_written_is_read(self, tmp_path: Path, planned: int, rows: int) -> None:
        """Also where pictures were rejected, so that there are fewer rows than were planned for."""
        writer = self.writer(tmp_path, planned)
        write(writer, images(rows), min(CHUNK, planned))
        files = writer.finish(columns(rows))
        assert set(files) == self.endings
        assert {path.name for path in tmp_path.iterdir()} == {"000001-00000" + ending for ending in files}
        found = self.read(files)
        assert np.array_equal(found.pop("image"), images(rows))
        assert list(found) == list(columns(rows))
        for name, values in columns(rows).items():
            assert found[name].tolist() == values.tolist()
            assert found[name].dtype == values.dtype
        assert writer.chunks == -(-rows // min(CHUNK, planned))

    def test_the_same_rows_are_the_same_bytes(self, tmp_path: Path) -> None:
        hashes = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            writer = self.writer(tmp_path / name, 20)
            write(writer, images(17))
            files = writer.finish(columns(17))
            hashes.append([shard_file(path, "x").sha256 for path in files.values()])
        assert hashes[0] == hashes[1]

    @pytest.mark.parametrize("rows", [0, 8, 13])
    def test_what_is_discarded_leaves_nothing(self, tmp_path: Path, rows: int) -> None:
        writer = self.writer(tmp_path, 20)
        write(writer, images(rows))
        writer.discard()
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_is_an_error_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Wherever it fills up: while the file is made, in a chunk, in a column, or at the end."""
        writer = self.writer(tmp_path, 20)
        write(writer, images(20))
        size = sum(path.stat().st_size for path in writer.finish(columns(20)).values())
        writer.discard()
        reached = set()
        for space in range(0, size, size // 40):
            fill_up(monkeypatch, space)
            begun: list[ShardWriter] = []
            stages = ["open"]
            with pytest.raises(OSError, match="no space in this test") as error:
                self.write_all(tmp_path, begun, stages)
            assert error.value.errno == errno.ENOSPC
            reached.add(stages[-1])
            for writer in begun:
                writer.discard()
            if not begun:  # the folder of work in progress goes as a whole
                next(tmp_path.iterdir()).unlink()
            assert list(tmp_path.iterdir()) == []
        assert reached >= {"write", "finish"}

    def write_all(self, folder: Path, begun: list[ShardWriter], stages: list[str]) -> None:
        begun.append(self.writer(folder, 20))
        stages.append("write")
        write(begun[0], images(20))
        stages.append("finish")
        begun[0].finish(columns(20))

    def test_a_name_that_is_taken_is_an_error(self, tmp_path: Path) -> None:
        self.writer(tmp_path, 20).discard()
        for ending in self.endings:
            (tmp_path / f"000001-00000{ending}").write_text("somebody's")
        with pytest.raises(FileExistsError):
            self.writer(tmp_path, 20)


class TestH5Writer(WriterContract):
    format = "hdf5"
    endings: ClassVar[set[str]] = {".h5"}

    def read(self, files: Mapping[str, Path]) -> dict[str, Any]:
        with h5py.File(files[".h5"]) as file:
            order = ["image", "label", "id", "crc32", "source_sha256", "source_shape"]
            assert set(file) == set(order)
            return {name: (file[name].asstr() if name == "id" else file[name])[...] for name in order}

    def test_the_filters_are_those_of_the_format(self, tmp_path: Path) -> None:
        writer = self.writer(tmp_path, 20)
        write(writer, images(20))
        with h5py.File(writer.finish(columns(20))[".h5"]) as file:
            image = file["image"]
            assert (image.chunks, image.compression, image.fletcher32) == ((CHUNK, *SHAPE), "lzf", True)
            assert all(file[name].fletcher32 for name in file if name != "id")
        assert (writer.chunks, writer.compressed_chunks) == (3, 1)  # the odd chunk, of flat pictures
        assert 0.2 < writer.saved_bytes / images(20).nbytes < 0.4

    @pytest.mark.parametrize("compression", ["gzip", "none"])
    def test_other_compressions(self, tmp_path: Path, compression: str) -> None:
        writer = self.writer(tmp_path, 20, compression=compression)
        write(writer, images(20))
        files = writer.finish(columns(20))
        assert np.array_equal(self.read(files)["image"], images(20))
        assert writer.compressed_chunks == (3 if compression == "gzip" else 0)

    def test_a_chunk_that_hdf5_lost_is_an_error(self, tmp_path: Path) -> None:
        writer = self.writer(tmp_path, 20)
        write(writer, images(20))
        writer.chunks += 1
        with pytest.raises(OSError, match="HDF5 kept 3 of 4 chunks"):
            writer.finish(columns(20))


class TestNpyWriter(WriterContract):
    format = "npy"
    endings: ClassVar[set[str]] = {
        f".{name}.npy" for name in ("image", "label", "id", "crc32", "source_sha256", "source_shape")
    }

    def read(self, files: Mapping[str, Path]) -> dict[str, Any]:
        found = {ending.split(".")[1]: np.load(path, allow_pickle=False) for ending, path in files.items()}
        assert all(values.dtype.byteorder in "<=|" and values.flags.c_contiguous for values in found.values())
        found["id"] = np.array([text.decode() for text in found["id"]], object)
        return found


def fill_up(monkeypatch: pytest.MonkeyPatch, space: int) -> None:
    """Let guarded files be on a disk that has ``space`` bytes left."""
    left = space

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            nonlocal left
            more = max(0, self.tell() + len(data) - os.fstat(self.fileno()).st_size)
            if more > left:
                raise OSError(errno.ENOSPC, "no space in this test")
            left -= more
            return super().write(data)

    monkeypatch.setattr(guard, "open", lambda path, mode, buffering: File(path, mode), raising=False)


class TestGuardedFile:
    def test_it_is_a_file(self, tmp_path: Path) -> None:
        with GuardedFile(tmp_path / "x") as file:
            file.write(b"abcdef")
            file.seek(1)
            assert file.read(2) == b"bc"
            assert file.truncate(4) == 4
            file.check()
            file.sync()
        assert (tmp_path / "x").read_bytes() == b"abcd"

    def test_it_keeps_its_first_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fill_up(monkeypatch, 4)
        with GuardedFile(tmp_path / "x") as file:
            assert file.write(b"abc") == 3
            file.check()
            assert file.write(b"def") == 3  # as if it were written
            file.seek(0)
            assert file.write(b"x") == 1
            for _ in range(2):
                with pytest.raises(OSError, match="no space in this test"):
                    file.check()
        assert (tmp_path / "x").read_bytes() == b"abc"

    def test_what_was_not_written_is_read_as_zeros(self, tmp_path: Path) -> None:
        """HDF5 would take anything else that its memory holds for its own structures."""
        with GuardedFile(tmp_path / "x") as file:
            file.write(b"abc")
            file.seek(1)
            memory = bytearray(b"\xff" * 6)
            assert file.readinto(memory) == 6
            assert memory == b"bc\0\0\0\0"

    @pytest.mark.parametrize("format", ["hdf5", "npy"])
    def test_a_limit_of_the_system_is_an_error_like_others(
        self, tmp_path: Path, format: str, python: Any
    ) -> None:
        code = """
import resource, sys
from pathlib import Path
import numpy as np
from shardwright.convert.options import StoreOptions
from shardwright.convert.store import shard_writer
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
writer = shard_writer(Path(sys.argv[1], "x"), 64, (64, 64, 3), StoreOptions(sys.argv[2], 8, compression="none"))
try:
    for _ in range(8):
        writer.write(np.ones((8, 64, 64, 3), np.uint8), 8)
except OSError as error:
    writer.discard()
    print(error.errno, list(Path(sys.argv[1]).iterdir()))
"""
        ran = python(code, str(tmp_path), format)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.split() == [str(errno.EFBIG), "[]"]


def test_a_shard_file_has_its_size_and_hash(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc" * 1000)
    found = shard_file(tmp_path / "x", "shards/x.h5")
    assert (found.name, found.bytes) == ("shards/x.h5", 3000)
    assert found.sha256 == hashlib.sha256(b"abc" * 1000).hexdigest()
