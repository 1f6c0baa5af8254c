"""From the loader to the device: copied beside the computing, then cropped, flipped and normalised there.

Pixels go over the bus as uint8, a quarter of float32. All of it works on the CPU too, by the same code.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shardwright.datasets.rows import Index
from shardwright.errors import UsageError
from shardwright.loaders.draws import Draws
from shardwright.loaders.loader import Loader
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
        if transform is None:
            return
        if "image" not in loader.columns or loader.image_dtype != torch.uint8:
            raise UsageError(
                f"transform is given for batches of {', '.join(loader.columns)}, images {loader.image_dtype}: "
                "expected uint8 images, which the loader does not normalise itself"
            )
        transform.shape(loader.image_shape)

    def __iter__(self) -> Iterator[Any]:
        position, batches = self.loader.begin()
        yield from self.loader.counted(position, self._moved(position, batches))

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
        drawn = self._drawn(position)
        if self.device.type != "cuda":
            for batch in batches:
                yield self._transformed(_to(batch, self.device), next(drawn))
            return
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        coming: deque[tuple[Any, torch.cuda.Event]] = deque()
        for batch in batches:
            with torch.cuda.stream(stream):
                # From pinned memory the copy does not hold up this thread; the pinned allocator waits for it before it
                # gives that memory out again.
                moved = self._transformed(_to(batch, self.device), next(drawn))
                coming.append((moved, stream.record_event()))
            if len(coming) > self._ahead:
                yield _arrived(*coming.popleft())
        while coming:
            yield _arrived(*coming.popleft())

    def _drawn(self, position: Position) -> Iterator[Draws | None]:
        if self.transform is None:
            while True:
                yield None
        drawing = self.loader.batches.drawing(self.transform, position.epoch, self.loader.image_shape)
        share = self.loader.batches.share(position.epoch, position.lanes)
        for k in range(position.batch, len(share)):
            yield drawing.draws(share.indices[share.bounds[k] : share.bounds[k + 1]].astype(np.int64))

    def _transformed(self, batch: Any, draws: Draws | None) -> Any:
        if self.transform is None or draws is None:
            return batch
        if isinstance(batch, torch.Tensor):
            return transformed(self.transform, batch, draws)
        at = self.loader.columns.index("image")
        images = batch[at] if isinstance(batch, tuple | list) and len(batch) > at else None
        if not isinstance(images, torch.Tensor) or images.shape[0] != len(draws.flips):
            raise UsageError(
                f"collate_fn makes {type(batch).__name__}, a transform on the device expects a tuple with the images "
                f"(N, C, H, W) at {at}, as shardwright.loaders.collate makes: call loaders.device.transformed yourself"
            )
        return (*batch[:at], transformed(self.transform, images, draws), *batch[at + 1 :])


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
        Batches that are copied before they are handed out; memory of the device for so many, and one more.

    Returns
    -------
    DeviceLoader
        Yields what the loader does; images (N, C, H, W) are channels-last in memory.

    Raises
    ------
    UsageError
        ``transform`` does not fit the images.
    """
    if ahead < 0:
        raise UsageError(f"ahead is {ahead}, expected 0 or more")
    return DeviceLoader(loader, torch.device(device), transform, ahead)


def transformed(transform: BatchTransform, images: torch.Tensor, draws: Draws) -> torch.Tensor:
    """``images``, uint8 (N, C, H, W) on any device, cropped, flipped and normalised as was drawn for each.

    Resizing is bilinear and antialiased: each output pixel is a triangle-weighted mean of the box, as Pillow's and
    torchvision's ``antialias=True``; it is not rounded before it is normalised.
    """
    pixels = images.permute(0, 2, 3, 1)
    resizes = isinstance(transform.crop, RandomResizedCrop)
    if resizes:
        height, width, _ = transform.shape((pixels.shape[1], pixels.shape[2], pixels.shape[3]))
        pixels = _resized(pixels, draws, height, width)
    elif transform.random or transform.crop is not None:
        pixels = _cropped(pixels, draws)
    if transform.normalize is not None:
        pixels = _normalized(pixels, transform.normalize)
    elif resizes:
        pixels = pixels.round_().to(torch.uint8)
    return pixels.contiguous().permute(0, 3, 1, 2)


def _cropped(pixels: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Boxes of one size out of (N, H, W, C)."""
    top, left, height, width = draws.boxes.T
    rows = top[:, None] + np.arange(height[0])
    columns = left[:, None] + np.arange(width[0])
    columns = np.where(draws.flips[:, None], columns[:, ::-1], columns)
    n = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    return pixels[n, _on(rows, pixels)[:, :, None], _on(columns, pixels)[:, None, :]]


def _resized(pixels: torch.Tensor, draws: Draws, height: int, width: int) -> torch.Tensor:
    """Boxes of any size out of (N, H, W, C), as float32 (N, height, width, C): two products of matrices each."""
    n, rows, columns, channels = pixels.shape
    top, left, box_height, box_width = (_on(side, pixels) for side in draws.boxes.T)
    down = _weights(top, box_height, rows, height)
    across = _weights(left, box_width, columns, width)
    across = torch.where(_on(draws.flips, pixels)[:, None, None], across.flip(1), across)
    lines = torch.bmm(down, pixels.reshape(n, rows, columns * channels).float())
    by_column = lines.view(n, height, columns, channels).transpose(1, 2).reshape(n, columns, -1)
    return torch.bmm(across, by_column).view(n, width, height, channels).transpose(1, 2)


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
    mean, std = (torch.tensor(values, device=pixels.device) for values in (normalize.mean, normalize.std))
    return torch.addcmul(-mean / std, pixels.float(), 1 / (255 * std)).to(normalize.dtype)


def _on(values: Index | Any, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device, non_blocking=True)


def _to(batch: Any, device: torch.device) -> Any:
    """All tensors of a batch, in tuples, lists and dicts, on ``device``; what is none is handed on."""
    match batch:
        case torch.Tensor():
            return batch.to(device, non_blocking=True)
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(_to(part, device) for part in batch))
        case tuple() | list():
            return type(batch)(_to(part, device) for part in batch)
        case dict():
            return {key: _to(part, device) for key, part in batch.items()}
    return batch


def _arrived(batch: Any, event: torch.cuda.Event) -> Any:
    """``batch``, which the current stream may use once ``event`` is there, and whose memory it holds."""
    current = torch.cuda.current_stream()
    current.wait_event(event)
    _recorded(batch, current)
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
