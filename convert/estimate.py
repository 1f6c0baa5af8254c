"""What a conversion would do, without doing it: counts, bytes, and a time from a few pictures."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.convert.jobs import decoding, jobs_allowed
from shardwright.convert.options import ConvertOptions
from shardwright.convert.scan import Scan
from shardwright.datasets.pixels import decode
from shardwright.errors import PictureError

_TRIED = 24
#: Share of a worker's time that goes into decoding and resizing, as benchmarks/convert.py finds it.
_DECODING_SHARE = 0.75


def estimate(tree: Scan, options: ConvertOptions) -> dict[str, Any]:
    """JSON values: files, classes, skipped, shards, bytes (at most) and seconds (about)."""
    jobs = options.jobs or jobs_allowed(decoding(options.pixels.max_pixels))
    return {
        "files": len(tree),
        "classes": len(tree.classes),
        "no_class": len(tree.no_class),
        "skipped": tree.skipped,
        "source_bytes": int(tree.sizes.sum()),
        "shards": -(-len(tree) // options.store.rows_per_shard(len(tree), options.row_bytes)),
        "bytes_at_most": len(tree) * options.row_bytes,
        "seconds_about": round(_seconds_a_picture(tree, options) * len(tree) / jobs / _DECODING_SHARE, 1),
    }


def _seconds_a_picture(tree: Scan, options: ConvertOptions) -> float:
    times = []
    for i in np.linspace(0, len(tree) - 1, min(_TRIED, len(tree)) + 1, dtype=int)[1:].tolist():
        start = time.perf_counter()
        try:
            decode(Path(tree.root, tree.paths[i]).read_bytes(), options.pixels)
        except (PictureError, OSError):
            continue
        times.append(time.perf_counter() - start)
    return float(np.mean(times[1:] or times)) if times else 0.0  # the first one loads the decoders
