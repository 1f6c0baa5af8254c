"""What a data set is, as JSON values and in words."""

from pathlib import Path
from typing import Any

import numpy as np

from shardwright.convert.lock import running_job
from shardwright.datasets.manifest import read_manifest
from shardwright.datasets.shards import finished_shard


def describe(folder: Path, *, files: bool = False, stats: bool = False) -> dict[str, Any]:
    """The newest version of the data set in ``folder`` as JSON values.

    Parameters
    ----------
    files
        Add each shard file's name, bytes and SHA-256.
    stats
        Add mean and standard deviation of each channel, and how many images each class has (which reads
        the labels).

    Raises
    ------
    FormatError
        There is no data set, or its manifest cannot be read.
    """
    manifest = read_manifest(folder)
    found: dict[str, Any] = {
        "folder": str(folder),
        "version": manifest.version,
        "storage": manifest.storage,
        "rows": manifest.rows,
        "dead_rows": sum(len(shard.dead_rows) for shard in manifest.shards),
        "image_shape": list(manifest.image_shape),
        "classes": list(manifest.classes),
        "shards": len(manifest.shards),
        "chunks": sum(shard.chunks for shard in manifest.shards),
        "compressed_chunks": sum(shard.compressed_chunks for shard in manifest.shards),
        "bytes": manifest.bytes,
        "rejected": dict(manifest.rejected),
        "duplicates": dict(manifest.duplicates),
        "suspect": dict(manifest.suspect),
        "skipped": dict(manifest.skipped),
        "options": dict(manifest.options),
        "seed": manifest.seed,
        "environment": dict(manifest.environment),
        "job": running_job(folder),
    }
    if stats:
        found["mean"], found["std"] = list(manifest.stats.mean), list(manifest.stats.std)
        counts = np.zeros(len(manifest.classes), np.int64)
        for number, shard in enumerate(manifest.shards):
            labels = finished_shard(folder, manifest, number).labels()
            living = np.delete(labels, list(shard.dead_rows))
            counts += np.bincount(living, minlength=len(counts))
        found["images_per_class"] = dict(zip(manifest.classes, counts.tolist(), strict=True))
    if files:
        found["files"] = [
            {"name": file.name, "bytes": file.bytes, "sha256": file.sha256}
            for shard in manifest.shards
            for file in shard.files
        ]
    return found


def in_words(found: dict[str, Any]) -> list[str]:
    """What `describe` found as lines for a person."""
    height, width, channels = found["image_shape"]
    lines = [
        f"'{found['folder']}': version {found['version']}, {found['rows']} images of {height}x{width}x{channels}, "
        f"{len(found['classes'])} classes",
        f"  {found['shards']} {found['storage']} shards, {found['bytes'] / 1e6:.1f} MB; "
        f"{found['compressed_chunks']} of {found['chunks']} chunks compressed",
        "  options: " + ", ".join(f"{key}={value}" for key, value in found["options"].items()),
    ]
    if job := found["job"]:
        of = "" if job.get("total") is None else f" of {job['total']}"
        far = f", {job['stage']}: {job.get('done')}{of} {job.get('unit')}" if job.get("stage") else ""
        who = f"process {job.get('pid')} on {job.get('host')}"
        lines.append(f"  now: {job.get('command')}, {who}, since {job.get('since')}{far}")
    for key in ("rejected", "suspect", "duplicates", "skipped"):
        if found[key]:
            lines.append(
                f"  {key}: " + ", ".join(f"{count} {reason}" for reason, count in found[key].items())
            )
    if "mean" in found:
        lines += [f"  {key}: " + " ".join(f"{value:.3f}" for value in found[key]) for key in ("mean", "std")]
        lines += [f"  {count:8d} {name}" for name, count in found["images_per_class"].items()]
    lines += [f"  {f['sha256']} {f['bytes']:12d} {f['name']}" for f in found.get("files", [])]
    return lines
