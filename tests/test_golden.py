"""Format version 1 as it was first written is read by this version. See tests/golden/make.py."""

import json
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from shardwright.convert.verify import verify
from shardwright.datasets import H5Dataset, NpyDataset, ShardedDataset, open_dataset
from shardwright.datasets.layout import id_to_path, path_to_id

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_bytes())
SAMPLES = EXPECTED["samples"]
COLUMNS = ("image", "label", "id", "crc32", "source_sha256", "source_shape")


class GoldenContract:
    """What holds for the golden data set of either format."""

    kind: type[ShardedDataset]

    @property
    def folder(self) -> Path:
        return GOLDEN / str(self.kind.storage)

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.folder / "manifest.json").read_bytes())

    def plain(self, shard: dict[str, Any], column: str) -> npt.NDArray[Any]:
        """A column of a shard, read without shardwright; ids as str."""
        raise NotImplementedError

    def test_it_is_version_1(self) -> None:
        assert self.manifest["format_version"] == 1
        assert self.manifest["needs"] == []
        assert (self.folder / "manifest-000001.json").read_bytes() == (
            self.folder / "manifest.json"
        ).read_bytes()

    @pytest.mark.parametrize("version", [None, 1])
    def test_it_opens_as_what_it_is(self, version: int | None) -> None:
        dataset = open_dataset(self.folder, version)
        assert type(dataset) is self.kind
        assert (dataset.version, len(dataset), dataset.image_shape) == (1, len(SAMPLES), (3, 8, 8))
        assert list(dataset.classes) == EXPECTED["classes"]

    def test_every_sample_one_by_one(self) -> None:
        dataset = self.kind(self.folder, columns=COLUMNS, verify="read")
        for sample, expected in zip(dataset, SAMPLES, strict=True):
            image, label, id, crc32, source_sha256, source_shape = sample
            assert zlib.crc32(image.permute(1, 2, 0).numpy()) == crc32 == expected["crc32"]
            assert (label, id) == (expected["label"], expected["id"])
            assert bytes(source_sha256.tolist()).hex() == expected["source_sha256"]
            assert source_shape.tolist() == expected["source_shape"]

    def test_a_batch_and_whole_columns(self) -> None:
        dataset = self.kind(self.folder)
        order = [len(dataset) - 1, 0, 7, 7, 3]
        images, labels = dataset.read_batch(order).columns
        assert [zlib.crc32(i.permute(1, 2, 0).numpy()) for i in images] == [
            SAMPLES[i]["crc32"] for i in order
        ]
        assert labels.tolist() == [SAMPLES[i]["label"] for i in order]
        assert dataset.labels().tolist() == [sample["label"] for sample in SAMPLES]
        assert dataset.ids() == [sample["id"] for sample in SAMPLES]

    def test_every_sample_without_shardwright(self) -> None:
        found = {
            name: np.concatenate([self.plain(shard, name) for shard in self.manifest["shards"]])
            for name in COLUMNS
        }
        assert [zlib.crc32(image) for image in found["image"]] == [sample["crc32"] for sample in SAMPLES]
        assert [row.tobytes().hex() for row in found["source_sha256"]] == [
            sample["source_sha256"] for sample in SAMPLES
        ]
        for name in ("label", "id", "crc32", "source_shape"):
            assert found[name].tolist() == [sample[name] for sample in SAMPLES]
        dtypes = [found[name].dtype for name in COLUMNS if name != "id"]
        assert dtypes == ["uint8", "int64", "uint32", "uint8", "int32"]
        pixels = found["image"].reshape(-1, 3)
        np.testing.assert_allclose(self.manifest["stats"]["mean"], pixels.mean(0))
        np.testing.assert_allclose(self.manifest["stats"]["std"], pixels.std(0))

    def test_full_verification_is_clean(self) -> None:
        assert verify(self.folder, full=True).damage == ()

    def test_ids_lead_back_to_paths(self) -> None:
        ids = open_dataset(self.folder).ids()
        paths = {id_to_path(id) for id in ids}
        assert {"naïve/back\\slash.png", "zebra/caf\udce9.png", "apple/ü 3.png"} < paths
        assert set(map(path_to_id, paths)) == set(ids)

    def test_report_names_the_reject(self) -> None:
        (line,) = (self.folder / "report-000001.jsonl").read_text().splitlines()
        finding = json.loads(line)
        assert (finding["id"], finding["verdict"], finding["reason"]) == (
            "apple/empty.jpg",
            "rejected",
            "empty",
        )
        assert self.manifest["rejected"] == {"empty": 1}


class TestHdf5(GoldenContract):
    kind = H5Dataset

    def plain(self, shard: dict[str, Any], column: str) -> npt.NDArray[Any]:
        with h5py.File(self.folder / shard["files"][0]["name"]) as h5:
            return h5[column].asstr()[:] if column == "id" else h5[column][:]

    def test_it_has_chunks_of_both_kinds_and_a_padded_one(self) -> None:
        masks, spare = [], []
        for shard in self.manifest["shards"]:
            with h5py.File(self.folder / shard["files"][0]["name"]) as h5:
                image = h5["image"]
                image.id.chunk_iter(lambda chunk: masks.append(chunk.filter_mask))
                spare.append(image.maxshape[0] - len(image))
                assert image.chunks == (4, 8, 8, 3)
        assert set(masks) == {0, 1}
        assert spare == [1, 0]


class TestNpy(GoldenContract):
    kind = NpyDataset

    def plain(self, shard: dict[str, Any], column: str) -> npt.NDArray[Any]:
        (name,) = [f["name"] for f in shard["files"] if f["name"].endswith(f".{column}.npy")]
        path = self.folder / name
        assert path.read_bytes()[:8] == b"\x93NUMPY\x01\x00"
        found = np.load(path, allow_pickle=False)
        if column == "id":
            assert found.dtype.kind == "S"
            return np.array([id.decode() for id in found.tolist()], object)
        return found
