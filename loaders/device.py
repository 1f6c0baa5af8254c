"""From the loader to the device: copied beside the computing, then cropped, flipped and normalised there.

Pixels go over the bus as uint8, a quarter of float32. All of it works on the CPU too, by the same code.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shardwright.datasets.rows import Index
from shardwright.errors import UsageError, whole_number
from shardwright.loaders.draws import Draws
from shardwright.loaders.loader import EpochIterator, Loader
from shardwright.loaders.position import Position
from shardwright.loaders.transform import BatchTransform, Normalize, RandomResizedCrop


class DeviceLoader:
    """Batches of a loader on a device. Made by `to_device`.

    Copies are made and transformed on a stream of their own, ``ahead`` batches before they are handed out, so that
    they overlap with the computing on the stream that is current where it is iterated.
    """

    def __init__(
        self, loader: Loader, device: torch.device, transform: BatchTransform | None, ahead: int
    ) -> None:
        self.loader, self.device, self.transform = loader, device, transform
        self._ahead = ahead
        self._stream: torch.cuda.Stream | None = None
        if transform is None:
            return
        if not isinstance(transform, BatchTransform):
            raise UsageError(f"transform is {type(transform).__name__}, expected a BatchTransform")
        if "image" not in loader.columns or loader.image_dtype != torch.uint8:
            raise UsageError(
                f"transform is given for batches of {', '.join(loader.columns)}, images {loader.image_dtype}: "
                "expected uint8 images, which the loader does not normalise itself"
            )
        if transform.random and loader.transform.random:
            raise UsageError(
                "crops or flips are to be drawn by the reading threads and on the device too, and both draw the same: "
                "a second flip would undo the first. Expected one of them"
            )
        transform.shape(loader.image_shape)

    def __iter__(self) -> Iterator[Any]:
        return EpochIterator(self.loader, self._begin)

    def _begin(self) -> tuple[Position, Iterator[Any]]:
        position, batches = self.loader.begin()
        return position, self._moved(position, batches)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As `Loader.state_dict`: batches that are on their way to the device are not counted."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Loader.load_state_dict`."""
        self.loader.load_state_dict(state)

    def _moved(self, position: Position, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches as they arrive on the device; ``ahead`` of them are on their way."""
        if self.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream, drawn = self._stream, self._drawn(position)
        coming: deque[tuple[Any, torch.cuda.Event | None]] = deque()
        for batch in batches:
            if stream is not None:  # what a collate function made on the device is made by the current stream
                stream.wait_stream(torch.cuda.current_stream(self.device))
                _recorded(batch, stream)
            # None is a stream too, the current one. From pinned memory the copy does not hold up this thread; the
            # pinned allocator waits for it before it gives that memory out again.
            with torch.cuda.stream(stream):
                moved = self._transformed(_to(batch, self.device), next(drawn))
            coming.append((moved, stream.record_event() if stream else None))
            if len(coming) > self._ahead:
                yield self._arrived(*coming.popleft())
        while coming:
            yield self._arrived(*coming.popleft())

    def _arrived(self, batch: Any, event: torch.cuda.Event | None) -> Any:
        """``batch``, which the current stream may use once ``event`` is there, and whose memory it holds."""
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            _recorded(batch, current)
        return batch

    def _drawn(self, position: Position) -> Iterator[Draws | None]:
        if self.transform is None:
            while True:
                yield None
        drawing = self.loader.batches.drawing(self.transform, position.epoch, self.loader.image_shape)
        share = self.loader.batches.share(position)
        for k in range(position.batch, len(share)):
            yield drawing.draws(share.indices[share.bounds[k] : share.bounds[k + 1]].astype(np.int64))

    def _transformed(self, batch: Any, draws: Draws | None) -> Any:
        if self.transform is None or draws is None:
            return batch
        alone = isinstance(batch, torch.Tensor)
        at = 0 if alone else self.loader.columns.index("image")
        parts = [batch] if alone else list(batch) if isinstance(batch, tuple | list) else []
        height, width, channels = self.loader.image_shape
        expected = (len(draws.flips), channels, height, width)
        found = parts[at] if len(parts) > at else None
        if not (isinstance(found, torch.Tensor) and found.dtype == torch.uint8 and found.shape == expected):
            what = (
                f"{found.dtype} {tuple(found.shape)}"
                if isinstance(found, torch.Tensor)
                else type(batch).__name__
            )
            raise UsageError(
                f"a batch is {what}, a transform on the device expects its images, uint8 {expected}, at {at} of a "
                "tuple, as they are without a transform of the Dataset and with shardwright.loaders.collate: call "
                "loaders.device.transformed yourself"
            )
        parts[at] = transformed(self.transform, found, draws)
        if alone:
            return parts[0]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def to_device(
    loader: Loader,
    device: torch.device | str,
    transform: BatchTransform | None = None,
    *,
    ahead: int = 2,
) -> DeviceLoader:
    """Iterate over ``loader`` with its batches on ``device``.

    Parameters
    ----------
    loader
        Made by `make_loader`. Its ``LoaderOptions.transform`` comes first, in its reading threads.
    transform
        What is done to uint8 images on the device. The same crops and flips are drawn as in the reading threads.
    ahead
        Batches that are on their way beside the one handed out; memory of the device for so many more.

    Returns
    -------
    DeviceLoader
        Yields what the loader does; images (N, C, H, W) are channels-last in memory.

    Raises
    ------
    UsageError
        ``transform`` does not fit the images.
    """
    ahead = whole_number("ahead", ahead, 0)
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return DeviceLoader(loader, where, transform, ahead)


def transformed(transform: BatchTransform, images: torch.Tensor, draws: Draws) -> torch.Tensor:
    """``images``, uint8 (N, C, H, W) on any device, cropped, flipped and normalised as was drawn for each.

    Resizing is bilinear and antialiased: each output pixel is a triangle-weighted mean of the box, as Pillow's and
    torchvision's ``antialias=True``; it is not rounded before it is normalised. It is done in float32, whatever
    autocast says; on CUDA ``torch.backends.cuda.matmul.allow_tf32`` counts.

    Raises
    ------
    UsageError
        ``images`` are none, or not as many as were drawn for; or ``transform`` does not fit them.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or len(images) != len(draws.flips):
        raise UsageError(
            f"images are {images.dtype} {tuple(images.shape)}, expected uint8 ({len(draws.flips)}, C, H, W)"
        )
    pixels = images.permute(0, 2, 3, 1)
    height, width, _ = transform.shape((pixels.shape[1], pixels.shape[2], pixels.shape[3]))
    resizes = isinstance(transform.crop, RandomResizedCrop)
    if transform.random or transform.crop is not None:
        drawn = _on(np.column_stack([draws.boxes, draws.flips]), pixels.device)
        pixels = (_resized if resizes else _cropped)(pixels, drawn, height, width)
    if transform.normalize is not None:
        pixels = _normalized(pixels, transform.normalize)
    elif resizes:
        pixels = pixels.round_().to(torch.uint8)
    return pixels.contiguous().permute(0, 3, 1, 2)


def _cropped(pixels: torch.Tensor, drawn: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Boxes of one size out of (N, H, W, C). ``drawn`` (N, 5): top, left, height, width, whether it is flipped."""
    rows = drawn[:, :1] + torch.arange(height, device=pixels.device)
    columns = drawn[:, 1:2] + torch.arange(width, device=pixels.device)
    columns = torch.where(drawn[:, 4:] > 0, columns.flip(1), columns)
    n = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    return pixels[n, rows[:, :, None], columns[:, None, :]]


def _resized(pixels: torch.Tensor, drawn: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Boxes of any size out of (N, H, W, C), as float32 (N, height, width, C): two products of matrices each."""
    n, rows, columns, channels = pixels.shape
    down = _weights(drawn[:, 0], drawn[:, 2], rows, height)
    across = _weights(drawn[:, 1], drawn[:, 3], columns, width)
    across = torch.where(drawn[:, 4, None, None] > 0, across.flip(1), across)
    with torch.autocast(pixels.device.type, enabled=False):
        lines = torch.bmm(down, pixels.reshape(n, rows, columns * channels).float())
        by_column = lines.view(n, height, columns, channels).transpose(1, 2)
        crossed = torch.bmm(across, by_column.reshape(n, columns, height * channels))
    return crossed.view(n, width, height, channels).transpose(1, 2)


def _weights(start: torch.Tensor, length: torch.Tensor, size: int, out: int) -> torch.Tensor:
    """float32 (n, out, size): what each of ``size`` pixels adds to each of ``out``; the box begins at ``start``."""
    scale = (length / out)[:, None, None]
    centre = start[:, None, None] + (torch.arange(out, device=start.device)[:, None] + 0.5) * scale
    pixel = torch.arange(size, device=start.device)
    weights = (1 - (pixel + 0.5 - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    inside = (pixel >= start[:, None, None]) & (pixel < (start + length)[:, None, None])
    weights = torch.where(inside, weights, 0)
    return (weights / weights.sum(dim=2, keepdim=True)).float()


def _normalized(pixels: torch.Tensor, normalize: Normalize) -> torch.Tensor:
    mean, std = np.array(normalize.mean), np.array(normalize.std)
    summand, factor = (_filled(values.tolist(), pixels.device) for values in (-mean / std, 1 / (255 * std)))
    return torch.addcmul(summand, pixels.float(), factor).to(normalize.dtype)


def _filled(values: list[float], device: torch.device) -> torch.Tensor:
    """``values`` made on the device: to copy them there would wait for what it has to do."""
    return torch.cat([torch.full((1,), value, device=device) for value in values])


def _on(values: Index, device: torch.device) -> torch.Tensor:
    """``values`` on the device, by a copy that does not hold up this thread."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _to(batch: Any, device: torch.device) -> Any:
    """All tensors of a batch, in tuples, lists and dicts, on ``device``; what is none is handed on."""
    match batch:
        case torch.Tensor():
            # To other devices than CUDA's such a copy may read memory that was given out again.
            return batch.to(device, non_blocking=device.type == "cuda")
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(_to(part, device) for part in batch))
        case tuple() | list():
            return type(batch)(_to(part, device) for part in batch)
        case dict():
            return {key: _to(part, device) for key, part in batch.items()}
    return batch


def _recorded(batch: Any, stream: torch.cuda.Stream) -> None:
    match batch:
        case torch.Tensor() if batch.is_cuda:
            batch.record_stream(stream)
        case tuple() | list():
            for part in batch:
                _recorded(part, stream)
        case dict():
            for part in batch.values():
                _recorded(part, stream)
