"""Memory that a reader takes again: chunks decoded last, and what each thread works on."""

import threading
from collections import OrderedDict

from shardwright.datasets.buffers import Pixels, aligned


class KeptChunks:
    """The decoded chunks used last, up to a number of bytes, but at least one."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._chunks: OrderedDict[int, Pixels] = OrderedDict()

    def get(self, chunk: int) -> Pixels | None:
        """The rows of ``chunk``; None where it is not kept."""
        with self._lock:
            if chunk in self._chunks:
                self._chunks.move_to_end(chunk)
            return self._chunks.get(chunk)

    def put(self, chunk: int, rows: Pixels) -> None:
        """Keep the rows of ``chunk``."""
        with self._lock:
            self._chunks[chunk] = rows
            while len(self._chunks) > 1 and len(self._chunks) * rows.nbytes > self._limit_bytes:
                self._chunks.popitem(last=False)


class Scratch(threading.local):
    """Memory of each thread that is taken again and again: new pages cost a tenth of decoding into them."""

    def __init__(self) -> None:
        self._buffers: dict[str, Pixels] = {}

    def take(self, name: str, size: int) -> Pixels:
        """``size`` bytes of undefined content, good until this thread takes ``name`` again."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = aligned(size)
        return buffer[:size]
