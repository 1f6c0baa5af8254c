"""Batches cropped, flipped and normalised: in the reading threads and on a device, as drawn for each sample."""

import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from building import Built, build
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shardwright.datasets import open_dataset
from shardwright.errors import ShardError, UsageError
from shardwright.loaders import (
    BatchTransform,
    CenterCrop,
    Loader,
    LoaderOptions,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    make_loader,
    to_device,
)
from shardwright.loaders.draws import Drawing

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def drawn(
    transform: BatchTransform, n: int = 4000, epoch: int = 0, seed: int = 0, shape: Any = (64, 48, 3)
) -> Any:
    return Drawing(transform, shape, seed, epoch).draws(np.arange(n))


# --- what is drawn --------------------------------------------------------------------------------------


@given(
    st.integers(1, 80),
    st.integers(1, 80),
    st.floats(0.01, 1),
    st.floats(0.01, 1),
    st.floats(0.2, 1),
    st.floats(1, 5),
    st.integers(0, 1 << 62),
)
def test_boxes_lie_inside(h: int, w: int, a: float, b: float, r0: float, r1: float, seed: int) -> None:
    crop = RandomResizedCrop(8, (min(a, b), max(a, b)), (r0, r1))
    boxes = drawn(BatchTransform(crop), 50, seed=seed, shape=(h, w, 3)).boxes
    top, left, height, width = boxes.T
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (top + height <= h).all()
    assert (left + width <= w).all()


def test_a_resized_crop_has_the_area_and_shape_asked_for() -> None:
    crop = RandomResizedCrop(8, (0.2, 0.5), (0.8, 1.25))
    boxes = drawn(BatchTransform(crop), shape=(400, 400, 3)).boxes
    area = boxes[:, 2] * boxes[:, 3] / 400**2
    ratio = np.log(boxes[:, 3] / boxes[:, 2])
    assert area.min() == pytest.approx(0.2, abs=0.005)
    assert area.max() == pytest.approx(0.5, abs=0.005)
    assert area.mean() == pytest.approx(0.35, abs=0.01)  # uniform
    assert np.abs(ratio).max() == pytest.approx(np.log(1.25), abs=0.02)
    assert ratio.mean() == pytest.approx(0, abs=0.01)
    places = boxes[:, 0] / (400 - boxes[:, 2])
    assert places.mean() == pytest.approx(0.5, abs=0.02)


def test_where_no_crop_fits_it_is_the_middle_of_the_shape_nearest() -> None:
    crop = RandomResizedCrop(8, (1, 1), (1, 1))
    assert (drawn(BatchTransform(crop), 5, shape=(30, 50, 3)).boxes == [0, 10, 30, 30]).all()
    assert (drawn(BatchTransform(crop), 5, shape=(50, 30, 3)).boxes == [10, 0, 30, 30]).all()


def test_crops_are_everywhere_and_flips_as_often_as_asked_for() -> None:
    draws = drawn(BatchTransform(RandomCrop((60, 40)), flip=0.25))
    assert set(draws.boxes[:, 0]) == set(range(5))
    assert set(draws.boxes[:, 1]) == set(range(9))
    assert np.bincount(draws.boxes[:, 0]).min() > 700
    assert draws.flips.mean() == pytest.approx(0.25, abs=0.03)
    assert abs(np.corrcoef(draws.boxes[:, 0], draws.boxes[:, 1])[0, 1]) < 0.05
    assert not drawn(BatchTransform(RandomCrop(8))).flips.any()
    assert drawn(BatchTransform(flip=1)).flips.all()


def test_draws_are_a_function_of_seed_epoch_and_index() -> None:
    transform = BatchTransform(RandomCrop(8), flip=0.5)
    whole = drawn(transform)
    again = Drawing(transform, (64, 48, 3), 0, 0).draws(np.array([3999, 17]))
    assert (again.boxes == whole.boxes[[3999, 17]]).all()
    for other in (drawn(transform, epoch=1), drawn(transform, seed=1)):
        assert (other.boxes[:, :2] != whole.boxes[:, :2]).any(axis=1).mean() > 0.9
        assert (other.flips != whole.flips).mean() == pytest.approx(0.5, abs=0.05)


# --- what becomes of the pixels -------------------------------------------------------------------------

SHAPE = (40, 36, 3)


@pytest.fixture(scope="module", params=["hdf5", "npy", "packed"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp(request.param) / "set"
    if request.param == "packed":
        return build(folder, rows=70, shape=SHAPE, flat=0.5)
    return build(folder, request.param, rows=70, shape=SHAPE, flat=0)


def loader_of(built: Built, transform: BatchTransform | None, order: Any = "exact", **others: Any) -> Loader:
    options = LoaderOptions(
        **{"workers": 2, "shuffle_by": order, "transform": transform, "quiet": True, **others}
    )
    dataset = open_dataset(built.folder, columns=("image", "label", "id"))
    return make_loader(dataset, 16, shuffle=True, seed=3, options=options)


def expected(built: Built, transform: BatchTransform, id: str, epoch: int) -> np.ndarray:
    """What should become of one image: plainly, by Pillow."""
    index = built.ids.index(id)
    draws = Drawing(transform, SHAPE, 3, epoch).draws(np.array([index]))
    top, left, height, width = draws.boxes[0].tolist()
    image = built.images[index][top : top + height, left : left + width]
    if isinstance(transform.crop, RandomResizedCrop):
        target = transform.shape(SHAPE)
        resized = Image.fromarray(image).resize((target[1], target[0]), Image.Resampling.BILINEAR)
        image = np.asarray(resized)
    image = image[:, ::-1] if draws.flips[0] else image
    if transform.normalize:
        image = (image / 255 - MEAN) / STD
    return image


TRANSFORMS = {
    "crop": BatchTransform(RandomCrop((32, 24))),
    "crop-flip": BatchTransform(RandomCrop(32), flip=0.5),
    "flip": BatchTransform(flip=0.5),
    "center": BatchTransform(CenterCrop(20), flip=0.3),
    "resized": BatchTransform(RandomResizedCrop((24, 32)), flip=0.5),
    "normalized": BatchTransform(RandomCrop(32), 0.5, Normalize(MEAN, STD)),
    "bfloat16": BatchTransform(RandomCrop(32), 0.5, Normalize(MEAN, STD, torch.bfloat16)),
    "float16": BatchTransform(normalize=Normalize(MEAN, STD, torch.float16)),
    "resized-normalized": BatchTransform(RandomResizedCrop(28), 0.5, Normalize(MEAN, STD)),
}


@pytest.mark.parametrize("where", ["threads", "device"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_image_is_what_was_drawn_for_it(built: Built, name: str, where: str) -> None:
    transform = TRANSFORMS[name]
    loader: Any
    if where == "threads":
        loader = loader_of(built, transform, "block")
    else:
        loader = to_device(loader_of(built, None, "block"), "cpu", transform)
    least = {torch.bfloat16: 0.02, torch.float16: 0.004}.get(transform.dtype, 1e-5)
    if isinstance(transform.crop, RandomResizedCrop):  # Pillow rounds twice, and with other weights
        least = 1.01 if transform.normalize is None else 1.01 / 255 / min(STD)
    seen = []
    for epoch in range(2):
        for images, labels, ids in loader:
            assert images.dtype == transform.dtype
            assert images.is_contiguous(memory_format=torch.channels_last)
            for image, label, id in zip(images.permute(0, 2, 3, 1).float().numpy(), labels, ids, strict=True):
                wanted = expected(built, transform, id, epoch)
                assert np.abs(image - wanted).max() <= least
                assert label == built.labels[built.ids.index(id)]
                seen.append(id)
    assert sorted(seen) == sorted(built.ids * 2)


def pixels_of(loader: Any) -> dict[str, bytes]:
    return {
        id: image.numpy().tobytes()
        for images, _, ids in loader
        for image, id in zip(images, ids, strict=True)
    }


@pytest.mark.parametrize("name", ["crop-flip", "resized"])
def test_the_same_for_any_workers_order_ranks_and_after_resuming(built: Built, name: str) -> None:
    transform = TRANSFORMS[name]
    whole = pixels_of(loader_of(built, transform))
    assert len(whole) == 70
    assert pixels_of(loader_of(built, transform, "block", workers=0)) == whole
    dataset = open_dataset(built.folder, columns=("image", "label", "id"))
    options = LoaderOptions(workers=1, transform=transform, quiet=True, uneven="spread")
    found: dict[str, bytes] = {}
    for rank in range(3):
        loader = make_loader(dataset, 5, shuffle=True, seed=3, ranks=(rank, 3), options=options)
        found |= pixels_of(loader)
    assert found == whole
    loader = loader_of(built, transform)
    for _ in zip(range(2), loader, strict=False):
        pass
    rest = loader_of(built, transform)
    rest.load_state_dict(loader.state_dict())
    after = pixels_of(rest)
    assert len(after) == 70 - 32
    assert after.items() <= whole.items()
    assert pixels_of(rest) != whole  # another epoch


def test_the_device_loader_counts_what_was_handed_out(built: Built) -> None:
    loader = to_device(loader_of(built, None), "cpu", TRANSFORMS["crop"], ahead=3)
    whole = pixels_of(loader)
    assert len(loader) == 5
    loader.set_epoch(0)
    batches = iter(loader)
    seen = [next(batches) for _ in range(2)]
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 2)
    other = to_device(loader_of(built, None), "cpu", TRANSFORMS["crop"])
    other.load_state_dict(state)
    assert {**pixels_of(seen), **pixels_of(other)} == whole


def test_the_cpu_and_the_device_share_the_work(built: Built) -> None:
    """Cropped by the threads, normalised on the device."""
    normalize = Normalize(MEAN, STD)
    crop = BatchTransform(RandomCrop(32), 0.5)
    loader = to_device(loader_of(built, crop), "cpu", BatchTransform(normalize=normalize))
    both = loader_of(built, BatchTransform(RandomCrop(32), 0.5, normalize))
    for (images, _, ids), (others, _, same) in zip(loader, both, strict=True):
        assert ids == same
        torch.testing.assert_close(images, others)


def test_a_device_gets_whatever_a_collate_function_makes(built: Built) -> None:
    dataset = open_dataset(built.folder)
    loader = make_loader(
        dataset, 16, collate_fn=lambda batch: {"x": batch.columns[0], "n": [len(batch), "a"]}
    )
    batch = next(iter(to_device(loader, "meta")))
    assert batch["x"].device.type == "meta"
    assert batch["n"] == [16, "a"]
    with pytest.raises(UsageError, match="collate_fn makes dict"):
        next(iter(to_device(loader, "cpu", TRANSFORMS["crop"])))


def test_opencv_resizes_by_area(built: Built) -> None:
    transform = BatchTransform(RandomResizedCrop((24, 32), resize="opencv"), flip=0.5)
    for images, _, ids in loader_of(built, transform):
        for image, id in zip(images.permute(0, 2, 3, 1).numpy(), ids, strict=True):
            index = built.ids.index(id)
            draws = Drawing(transform, SHAPE, 3, 0).draws(np.array([index]))
            top, left, height, width = draws.boxes[0].tolist()
            part = built.images[index][top : top + height, left : left + width]
            wanted = cv2.resize(part, (32, 24), interpolation=cv2.INTER_AREA)
            assert (image == (wanted[:, ::-1] if draws.flips[0] else wanted)).all()


def test_without_opencv(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(UsageError, match="pip install opencv-python-headless"):
        loader_of(built, BatchTransform(RandomResizedCrop(24, resize="opencv")))


# --- what cannot be -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RandomCrop(0), "size is 0"),
        (lambda: CenterCrop((3, 4, 5)), "size is"),  # type: ignore[arg-type]
        (lambda: RandomResizedCrop(8, scale=(0.5, 0.2)), "scale is"),
        (lambda: RandomResizedCrop(8, ratio=(0, 1)), "ratio is"),
        (lambda: RandomResizedCrop(8, resize="cv"), "resize is 'cv'"),  # type: ignore[arg-type]
        (lambda: Normalize((116.8,), (64.9,)), "divide by 255"),
        (lambda: Normalize((0.5,), (0.0,)), "divide by 255"),
        (lambda: Normalize((0.5, 0.5), (0.5,)), "mean has 2 channels, std 1"),
        (lambda: Normalize((0.5,), (0.5,), torch.int8), "dtype is torch.int8"),
        (lambda: BatchTransform(flip=2), "flip is 2"),
    ],
)
def test_options_that_make_no_sense(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_transforms_that_do_not_fit_the_data_set(built: Built) -> None:
    for transform, says in [
        (BatchTransform(RandomCrop(41)), "a crop of 41x41 from images of 40x36"),
        (BatchTransform(normalize=Normalize((0.5,), (0.5,))), "mean has 1 channels, the images have 3"),
    ]:
        with pytest.raises(UsageError, match=says):
            loader_of(built, transform)
        with pytest.raises(UsageError, match=says):
            to_device(loader_of(built, None), "cpu", transform)
    crop = TRANSFORMS["crop"]
    with pytest.raises(UsageError, match="for the reading threads, and here are processes"):
        loader_of(built, crop, engine="processes")
    per_sample = open_dataset(built.folder, transform=torch.neg)
    with pytest.raises(UsageError, match="not both"):
        make_loader(per_sample, 16, options=LoaderOptions(transform=crop))
    with pytest.raises(UsageError, match="no images are among the columns label"):
        make_loader(open_dataset(built.folder, columns=["label"]), 4, options=LoaderOptions(transform=crop))
    with pytest.raises(UsageError, match="does not normalise itself"):
        to_device(loader_of(built, TRANSFORMS["normalized"]), "cpu", TRANSFORMS["float16"])


def test_the_statistics_of_the_data_set(built: Built) -> None:
    dataset = open_dataset(built.folder)
    normalize = Normalize.of(dataset)
    images = torch.cat(
        [
            x
            for x, _ in make_loader(
                dataset, 16, options=LoaderOptions(transform=BatchTransform(normalize=normalize))
            )
        ]
    )
    assert images.mean((0, 2, 3)).abs().max() < 1e-3
    assert (images.std((0, 2, 3)) - 1).abs().max() < 1e-3


def test_a_damaged_row_is_found_before_it_is_cropped(tmp_path: Path) -> None:
    built = build(tmp_path / "set", rows=40, shape=SHAPE, flat=0)
    file = next((built.folder / "shards").iterdir())
    content = bytearray(file.read_bytes())
    at = content.index(built.images[0].tobytes())
    content[at] ^= 1  # in a corner that no crop of the middle shows
    file.write_bytes(content)
    options = LoaderOptions(transform=BatchTransform(CenterCrop(8)))
    with pytest.raises(ShardError, match="CRC-32"):
        list(make_loader(open_dataset(built.folder), 16, options=options))
