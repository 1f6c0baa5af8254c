"""Generated damage: whatever the bytes, an answer or an error that is ours; no crash, no hang, nothing else.

`make soak` tries many more examples.
"""

import json
import unicodedata
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import Built, build
from drawing import encoded, jpeg, noise, photograph, put
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from shardwright.convert.scan import scan
from shardwright.datasets import open_dataset
from shardwright.datasets.ids import id_to_path, path_to_id
from shardwright.datasets.pixels import Picture, PixelOptions, decode
from shardwright.errors import PictureError, ShardwrightError, SourceError

IMAGE = Image.fromarray(photograph(24, 30))
PICTURES = [
    *(jpeg(24, 30, progressive=p, subsampling=s) for p in (False, True) for s in (0, 2)),
    *(encoded(IMAGE.convert(mode)) for mode in ("L", "CMYK")),
    *(encoded(IMAGE, format) for format in ("PNG", "WEBP", "TIFF", "BMP", "PPM", "GIF", "MPO", "JPEG2000")),
    encoded(IMAGE, "TIFF", compression="tiff_lzw"),
    encoded(IMAGE.convert("P"), "PNG", transparency=3),
    encoded(Image.fromarray(noise(9, 9, channels=4)), "PNG"),
    encoded(Image.fromarray(np.arange(81, dtype=np.uint16).reshape(9, 9) * 700), "PNG"),
]
OPTIONS = st.builds(
    PixelOptions,
    size=st.sampled_from([1, 7, 32]),
    fit=st.sampled_from(["crop", "pad", "stretch"]),
    channels=st.sampled_from([1, 3]),
    bits=st.sampled_from([None, 8, 12]),
    orient=st.booleans(),
    suspect=st.sampled_from(["keep", "reject"]),
)
REASONS = {
    "empty", "not-a-picture", "unsupported", "too-large", "truncated", "damaged", "out-of-range", "decoder-warning",
    "not-checked", "low-range",
}  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """``whole`` after a few changes: bytes changed, cut out, put in, doubled, or cut off."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 12))
        match draw(st.sampled_from(["change", "cut", "insert", "double", "end"])):
            case "change":
                data[at : at + length] = draw(st.binary(min_size=length, max_size=length))
            case "cut":
                del data[at : at + length]
            case "insert":
                data[at:at] = draw(st.binary(max_size=length))
            case "double":
                data[at:at] = data[at : at + 40 * length]
            case "end":
                del data[at:]
    return bytes(data)


def decoded(data: bytes, options: PixelOptions) -> Picture | None:
    """The picture; None where it is rejected for a reason that there is."""
    why = None
    try:
        return decode(data, options)
    except PictureError as error:
        why = error
    assert why.reason in REASONS
    assert why.message
    return None


@given(st.sampled_from(PICTURES).flatmap(damaged), OPTIONS)
def test_pictures(data: bytes, options: PixelOptions) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in a worker
        picture = decoded(data, options)
    if picture is None:
        return
    assert picture.pixels.shape == (options.size, options.size, options.channels)
    assert picture.pixels.dtype == np.uint8
    assert picture.pixels.flags.c_contiguous
    assert min(picture.source_shape) >= 1
    assert not (picture.doubt and options.suspect == "reject")


@given(st.binary(max_size=300).map(lambda data: b"\xff\xd8\xff" + data) | st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decoded(data, PixelOptions(size=8))


# --- trees ----------------------------------------------------------------------------------------------

NAMES = st.binary(min_size=1, max_size=30).filter(
    lambda name: not set(name) & {0, 47} and name not in (b".", b"..")
)


@given(st.binary(min_size=1, max_size=40).filter(lambda name: 0 not in name))
def test_any_path_has_an_id_of_its_own(name: bytes) -> None:
    path = name.decode("utf-8", "surrogateescape")
    assert id_to_path(path_to_id(path)) == path
    path_to_id(path).encode("utf-8")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.tuples(NAMES, NAMES), max_size=12))
def test_trees(tmp_path_factory: pytest.TempPathFactory, names: list[tuple[bytes, bytes]]) -> None:
    root = tmp_path_factory.mktemp("tree")
    files = {
        f"{folder.decode('utf-8', 'surrogateescape')}/{name.decode('utf-8', 'surrogateescape')}.jpg": b"x"
        for folder, name in names
    }
    try:
        put(root, files)
    except OSError:  # a file system with rules of its own
        return
    forms = [
        unicodedata.normalize("NFC", f).casefold() for f in {p.split("/")[0] for p in files} if f[0] != "."
    ]
    if len(set(forms)) < len(forms):
        with pytest.raises(SourceError, match="differ only in case or Unicode form"):
            scan(root)
        return
    found = scan(root)
    visible = {path for path in files if not any(part.startswith(".") for part in path.split("/"))}
    system = {
        path for path in visible if path.split("/")[0].lower() in ("lost+found", "__macosx", "$recycle.bin")
    }
    assert set(found.paths) == visible - system
    assert len(set(map(path_to_id, found.paths))) == len(found)
    assert all(
        found.classes[k] == path_to_id(p.split("/")[0])
        for k, p in zip(found.labels, found.paths, strict=True)
    )


# --- what lies on disk ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["hdf5", "npy"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("set") / "set", request.param, rows=24, shard_rows=12, chunk_rows=4)


def read_all(folder: Path) -> tuple[Any, Any, list[str]]:
    dataset = open_dataset(folder)
    images, labels = dataset.read_batch(range(len(dataset))).columns
    return images.permute(0, 2, 3, 1).numpy(), labels.numpy(), dataset.ids()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_manifests(built: Built, data: st.DataObject) -> None:
    """One value of the manifest, at any depth, is another one."""
    found = json.loads(built.manifest.to_json())
    place: Any = found
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(JSON_VALUES)
        break
    text = json.dumps(found)
    before = (built.folder / "manifest.json").read_text()
    try:
        for name in ("manifest.json", "manifest-000001.json"):
            (built.folder / name).write_text(text)
        with suppress(ShardwrightError):
            read_all(built.folder)
    finally:
        for name in ("manifest.json", "manifest-000001.json"):
            (built.folder / name).write_text(before)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_shards(built: Built, data: st.DataObject) -> None:
    """Bytes of a shard's file are others, at the same size: what was written is read, or an error of ours."""
    file = built.folder / data.draw(st.sampled_from([f.name for s in built.manifest.shards for f in s.files]))
    before = file.read_bytes()
    changed = bytearray(before)
    for _ in range(data.draw(st.integers(1, 3))):
        # Where structures lie as often as where pixels do.
        at = data.draw(st.integers(0, min(2048, len(changed) - 1)) | st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    try:
        file.write_bytes(changed)
        try:
            images, labels, ids = read_all(built.folder)
        except ShardwrightError:
            return
        np.testing.assert_array_equal(images, built.images)
        np.testing.assert_array_equal(labels, built.labels)
        if built.manifest.storage == "npy":  # in HDF5 nothing but the SHA-256 of the file guards ids
            assert ids == built.ids
    finally:
        file.write_bytes(before)
