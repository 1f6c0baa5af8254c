"""The contract of a Dataset, over both formats."""

import multiprocessing
import os
import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from building import Built, build, recorded_reads, send_labels
from torch.utils.data import ConcatDataset, DataLoader, Subset, WeightedRandomSampler, random_split

from shardwright.datasets import H5Dataset, NpyDataset, ShardedDataset, open_dataset
from shardwright.datasets.manifest import write_manifest
from shardwright.errors import FormatError, ShardError, UsageError
from shardwright.loaders import collate


class DatasetContract:
    kind: type[ShardedDataset]

    @pytest.fixture
    def built(self, tmp_path: Path) -> Built:
        return build(tmp_path / "built", self.kind.storage)  # type: ignore[arg-type]

    @pytest.fixture
    def dataset(self, built: Built) -> ShardedDataset:
        return self.kind(built.folder)

    def test_every_sample(self, built: Built, dataset: ShardedDataset) -> None:
        assert len(dataset) == len(built.images)
        for i, (image, label) in enumerate(dataset):
            assert image.dtype == torch.uint8
            assert image.shape == (3, 8, 8)
            assert type(label) is int
            assert label == built.labels[i]
            np.testing.assert_array_equal(image.permute(1, 2, 0), built.images[i])

    @pytest.mark.parametrize("index", [-1, np.int64(-1), np.uint8(49), torch.tensor(49), np.array(49)])
    def test_indices_of_any_kind(self, built: Built, dataset: ShardedDataset, index: int) -> None:
        image, label = dataset[index]
        np.testing.assert_array_equal(image.permute(1, 2, 0), built.images[49])
        assert label == built.labels[49]

    @pytest.mark.parametrize("index", [50, -51, 10**12])
    def test_out_of_range(self, dataset: ShardedDataset, index: int) -> None:
        with pytest.raises(IndexError, match=f"index {index} of a data set of 50"):
            dataset[index]

    @pytest.mark.parametrize("index", [1.0, "1", None, [1, 2]])
    def test_what_is_no_index(self, dataset: ShardedDataset, index: object) -> None:
        with pytest.raises(TypeError):
            dataset[index]

    def test_results_are_the_users_own(self, built: Built, dataset: ShardedDataset) -> None:
        image, _ = dataset[3]
        image.zero_()
        np.testing.assert_array_equal(dataset[3][0].permute(1, 2, 0), built.images[3])

    def test_a_batch_in_any_order_with_repeats(self, built: Built, dataset: ShardedDataset) -> None:
        wanted = [49, 0, 7, 7, -1, 20, 19, 3]
        images, labels = dataset.__getitems__(wanted).columns  # type: ignore[attr-defined]
        np.testing.assert_array_equal(images.permute(0, 2, 3, 1), built.images[wanted])
        np.testing.assert_array_equal(labels, built.labels[wanted])
        assert images.is_contiguous(memory_format=torch.channels_last)

    def test_a_chunk_is_read_once_a_call(
        self, built: Built, dataset: ShardedDataset, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset[0]
        read = recorded_reads(monkeypatch)
        dataset.read_batch(np.random.default_rng(0).permutation(8))  # the rows of the first chunk
        assert len(set(read)) == len(read)
        assert sum(size for _, _, size in read) <= 8 * 8 * 8 * 3

    def test_columns_asked_for(self, built: Built) -> None:
        dataset = self.kind(built.folder, columns=("id", "label", "source_shape", "crc32", "source_sha256"))
        assert dataset[4][:2] == (built.ids[4], built.labels[4])
        batch = dataset.read_batch([30, 2, 30])
        assert batch.columns[0] == [built.ids[i] for i in (30, 2, 30)]
        assert [tuple(column.shape) for column in batch.columns[1:]] == [(3,), (3, 2), (3,), (3, 32)]
        assert dataset.ids() == built.ids
        np.testing.assert_array_equal(dataset.labels(), built.labels)
        with pytest.raises(FormatError, match="asked for \\['colour'\\]"):
            self.kind(built.folder, columns=("image", "colour"))

    def test_transforms(self, built: Built) -> None:
        dataset = self.kind(built.folder, transform=lambda image: image.float() / 255, target_transform=str)
        image, label = dataset[5]
        assert image.dtype == torch.float32
        assert label == str(built.labels[5])
        (image, label), _ = dataset.__getitems__([5, 6])
        assert label == str(built.labels[5])

    def test_a_subclass_that_makes_its_own_samples(self, built: Built) -> None:
        class Doubled(self.kind):  # type: ignore[name-defined, misc]
            def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
                image, label = super().__getitem__(index)
                return image, label * 2

        for _, labels in DataLoader(Doubled(built.folder), batch_size=10):
            assert (labels % 2 == 0).all()
        assert [label for _, label in Doubled(built.folder).__getitems__([0, 1])] == list(
            built.labels[:2] * 2
        )

    def test_nothing_is_open_before_use_or_in_a_pickle(self, built: Built) -> None:
        before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
        dataset = self.kind(built.folder)
        if before:
            assert set(os.listdir("/proc/self/fd")) <= before
        dataset[0]
        text = pickle.dumps(dataset)
        assert len(text) < 500
        assert pickle.loads(text)[7][1] == built.labels[7]

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_survives_every_start_method(self, built: Built, dataset: ShardedDataset, method: str) -> None:
        dataset[0]
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=send_labels, args=(dataset, queue))
        process.start()
        assert queue.get(timeout=60) == built.labels.tolist()
        process.join()

    def test_in_torchs_own_hands(self, built: Built, dataset: ShardedDataset) -> None:
        halves = random_split(dataset, [20, 30], torch.Generator().manual_seed(0))
        labels = [label for part in halves for _, labels in DataLoader(part, 7) for label in labels.tolist()]
        assert sorted(labels) == sorted(built.labels.tolist())
        joined = ConcatDataset([dataset, Subset(dataset, [3, 1])])
        assert [joined[i][1] for i in (49, 50, 51)] == built.labels[[49, 3, 1]].tolist()
        sampler = WeightedRandomSampler([0.0] * 49 + [1.0], 12)
        for images, labels in DataLoader(dataset, 6, sampler=sampler, collate_fn=collate):
            np.testing.assert_array_equal(images.permute(0, 2, 3, 1), built.images[[49] * 6])
            assert (labels == built.labels[49]).all()

    @pytest.mark.parametrize("workers", [0, 2])
    def test_in_a_stock_dataloader(self, built: Built, dataset: ShardedDataset, workers: int) -> None:
        seen = []
        for images, labels in DataLoader(dataset, 8, shuffle=True, num_workers=workers):
            for image, label in zip(images, labels, strict=True):
                i = next(
                    i for i in range(50) if np.array_equal(built.images[i], image.permute(1, 2, 0).numpy())
                )
                assert label == built.labels[i]
                seen.append(i)
        assert sorted(seen) == list(range(50))

    def test_dead_rows_are_passed_over(self, tmp_path: Path) -> None:
        built = build(tmp_path / "set", self.kind.storage, dead={0: (0, 5, 19), 2: (9,)})  # type: ignore[arg-type]
        dataset = self.kind(built.folder)
        assert len(dataset) == 46
        images, labels = dataset.read_batch(range(46)).columns
        np.testing.assert_array_equal(images.permute(0, 2, 3, 1), built.images)
        np.testing.assert_array_equal(labels, built.labels)
        assert dataset.ids() == built.ids

    @pytest.mark.parametrize("rows", [1, 7, 8, 9, 20, 21])
    def test_odd_sizes_and_grey(self, tmp_path: Path, rows: int) -> None:
        built = build(tmp_path / "set", self.kind.storage, rows=rows, shape=(5, 7, 1))  # type: ignore[arg-type]
        images, _ = self.kind(built.folder).read_batch(range(rows)).columns
        np.testing.assert_array_equal(images.permute(0, 2, 3, 1), built.images)

    @pytest.mark.parametrize(("verify", "raises"), [("off", False), ("first", True), ("read", True)])
    def test_a_flipped_bit_is_found(self, tmp_path: Path, verify: str, raises: bool) -> None:
        built = build(tmp_path / "set", self.kind.storage, flat=0)  # type: ignore[arg-type]
        file = built.folder / next(
            f.name for f in built.manifest.shards[1].files if "image" in f.name or "h5" in f.name
        )
        data = bytearray(file.read_bytes())
        at = data.index(built.images[25].tobytes()) + 17
        data[at] ^= 1
        file.write_bytes(data)
        dataset = self.kind(built.folder, verify=verify)  # type: ignore[arg-type]
        dataset[24]
        if raises:
            with pytest.raises(ShardError, match=rf"{file.name}': .* row 5 .*CRC-32"):
                dataset[25]
        else:
            dataset[25]

    @pytest.mark.parametrize("damage", ["missing", "short", "garbage", "replaced"])
    def test_a_damaged_shard_names_the_file(self, tmp_path: Path, damage: str) -> None:
        built = build(tmp_path / "set", self.kind.storage)  # type: ignore[arg-type]
        file = built.folder / next(
            f.name for f in built.manifest.shards[1].files if "image" in f.name or "h5" in f.name
        )
        size = file.stat().st_size
        match damage:
            case "missing":
                file.unlink()
            case "short":
                os.truncate(file, size - 1)
            case "garbage":
                file.write_bytes(b"x" * size)
            case "replaced":
                file.write_bytes((built.folder / built.manifest.shards[2].files[0].name).read_bytes())
        dataset = self.kind(built.folder)
        dataset[0]
        with pytest.raises(ShardError, match=str(file)):
            dataset[25]

    @pytest.mark.parametrize("what", ["the file", "its folder"])
    def test_links_out_of_the_data_set_are_refused(self, built: Built, tmp_path: Path, what: str) -> None:
        link = built.folder / "shards"
        if what == "the file":
            link /= Path(built.manifest.shards[0].files[0].name).name
        link.rename(tmp_path / "elsewhere")
        link.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ShardError, match="link"):
            self.kind(built.folder)[0]

    def test_cut_short_while_open(self, tmp_path: Path) -> None:
        built = build(tmp_path / "set", self.kind.storage, flat=0)  # type: ignore[arg-type]
        dataset = self.kind(built.folder)
        dataset[20]
        for file in built.manifest.shards[1].files:
            os.truncate(built.folder / file.name, 2000)
        with pytest.raises(ShardError, match="ends before"):
            dataset.read_batch(range(20, 40))

    def test_more_shards_than_files_may_be_open(self, tmp_path: Path) -> None:
        resource = pytest.importorskip("resource")
        built = build(tmp_path / "set", self.kind.storage, rows=400, shard_rows=4, chunk_rows=4)  # type: ignore[arg-type]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 70, hard))
        try:
            images, _ = self.kind(built.folder).read_batch(np.random.default_rng(0).permutation(400)).columns
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        np.testing.assert_array_equal(
            images.permute(0, 2, 3, 1), built.images[np.random.default_rng(0).permutation(400)]
        )


class TestH5Dataset(DatasetContract):
    kind = H5Dataset

    @pytest.mark.parametrize("compression", ["lzf", "gzip", "none"])
    def test_every_compression(self, tmp_path: Path, compression: str) -> None:
        built = build(tmp_path / "set", compression=compression)
        packed = sum(shard.compressed_chunks for shard in built.manifest.shards)
        assert packed in {"lzf": range(1, 8), "gzip": [8], "none": [0]}[compression]
        images, _ = self.kind(built.folder, verify="read").read_batch(range(50)).columns
        np.testing.assert_array_equal(images.permute(0, 2, 3, 1), built.images)

    def test_beside_plain_h5py(self, tmp_path: Path) -> None:
        built = build(tmp_path / "set")
        with h5py.File(built.folder / built.manifest.shards[0].files[0].name):
            assert self.kind(built.folder)[0][1] == built.labels[0]


class TestNpyDataset(DatasetContract):
    kind = NpyDataset

    @pytest.mark.parametrize("column", ["label", "crc32", "id"])
    def test_a_changed_value_of_a_small_column_is_found(self, tmp_path: Path, column: str) -> None:
        built = build(tmp_path / "set", "npy")
        file = built.folder / f"shards/000001-00000.{column}.npy"
        data = bytearray(file.read_bytes())
        data[128] ^= 1  # for a label: another class that is there
        file.write_bytes(data)
        with pytest.raises(ShardError, match=f"{file.name}': SHA-256 is"):
            self.kind(built.folder, columns=("id", "image", "label"))[0]


def test_open_dataset_takes_either(tmp_path: Path) -> None:
    for storage, kind, other in (("hdf5", H5Dataset, NpyDataset), ("npy", NpyDataset, H5Dataset)):
        built = build(tmp_path / storage, storage)  # type: ignore[arg-type]
        assert type(open_dataset(built.folder)) is kind
        assert open_dataset(str(built.folder), 1, ["label"])[0] == (built.labels[0],)
        with pytest.raises(FormatError, match=f"is {storage}"):
            other(built.folder)
        with pytest.raises(FormatError, match="has no version 2, it has 1"):
            open_dataset(built.folder, version=2)
    with pytest.raises(UsageError, match="verify is 'maybe'"):
        open_dataset(built.folder, verify="maybe")  # type: ignore[arg-type]
    for version in ("1", True, 1.0):
        with pytest.raises(UsageError, match="version is .*expected a whole number"):
            open_dataset(built.folder, version=version)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(FormatError, match="it is not a folder"):
        open_dataset(tmp_path / "file")
    with pytest.raises(FormatError, match="no such folder"):
        open_dataset(tmp_path / "nowhere")


def test_a_folder_of_splits_names_them(tmp_path: Path) -> None:
    build(tmp_path / "out" / "train")
    build(tmp_path / "out" / "val")
    with pytest.raises(FormatError, match=r"open one of them, .*out/train', .*out/val'"):
        open_dataset(tmp_path / "out")


@pytest.mark.parametrize("storage", ["hdf5", "npy"])
def test_any_damage_to_a_header_is_a_shard_error(tmp_path: Path, storage: Any) -> None:
    """Flipped bytes in the first kilobytes, where HDF5 and npy keep what they know of the data."""
    built = build(tmp_path / "set", storage, rows=20)
    file = built.folder / built.manifest.shards[0].files[0].name
    sound = file.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(sound)
        at = int(rng.integers(0, 128 if storage == "npy" else 2500))
        damaged[at] ^= int(rng.integers(1, 256))
        file.write_bytes(damaged)
        with suppress(ShardError):
            images, labels = open_dataset(built.folder).read_batch(range(20)).columns
            np.testing.assert_array_equal(images.permute(0, 2, 3, 1), built.images)
            np.testing.assert_array_equal(labels, built.labels)


def test_labels_that_a_disk_lost_are_not_those_of_the_first_class(tmp_path: Path) -> None:
    """The fletcher32 of zeros is zero. Labels that are all of the first class, and were, are read."""
    built = build(tmp_path / "lost", "hdf5")
    path = built.folder / built.manifest.shards[1].files[0].name
    with h5py.File(path) as h5:
        assert h5["label"][...].any()
        chunk = h5["label"].id.get_chunk_info(0)
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(bytes(chunk.size))
    with h5py.File(path) as h5:
        assert not h5["label"][...].any()  # without a word
    dataset = open_dataset(built.folder)
    row = built.manifest.shards[0].rows
    with pytest.raises(ShardError, match="SHA-256"):
        dataset[row]
    with pytest.raises(ShardError, match="SHA-256"):
        open_dataset(built.folder).labels()
    sound = build(tmp_path / "sound", "hdf5", classes=1)
    manifest = replace(sound.manifest, classes=("first", "second"))
    write_manifest(sound.folder, manifest)
    assert open_dataset(sound.folder)[0][1] == 0
