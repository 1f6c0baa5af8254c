"""Measure the conversion against decoding alone, on the same pictures, in one run (`make bench`).

Decoding alone is a pool of processes that read the files and decode them with the converter's own decoder, to
RGB, and throw the pixels away: no converter with that decoder can be faster. The rounds are interleaved and
every other one runs backwards, so that a machine that slows down does not favour one side. What takes the
time inside a worker comes from a profile of the real `write_shard`, in a process like the converter's own.
"""

import argparse
import cProfile
import io
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import simplejpeg
from joblib.externals.loky import ProcessPoolExecutor
from PIL import Image

from shardwright.convert import encode, guard, options, plan, run, stats, store, write
from shardwright.convert.environment import environment
from shardwright.datasets import fit, jpeg, modes, pixels
from shardwright.datasets.ids import path_to_id
from shardwright.errors import PictureError, ShardwrightError

REPOSITORY = Path(__file__).resolve().parent.parent
BENCH = REPOSITORY / "build" / "bench"
SIZE = "500x375"  # the commonest of ImageNet
FILES_A_TASK = 32
PROFILED_IMAGES = 640
# As in the converter: a worker decodes one picture at a time.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Decoder = Callable[[bytes], object]


class Cost(NamedTuple):
    """Seconds by the clock, and seconds of CPU over all processes, which others on the machine change less."""

    seconds: float
    cpu: float


# --- decoding alone -----------------------------------------------------------------------------------


def with_simplejpeg(data: bytes) -> object:
    """Decode as the converter does: libjpeg-turbo, its warnings taken as errors."""
    return simplejpeg.decode_jpeg(data, "RGB", strict=True)


def with_pillow(data: bytes) -> object:
    """Decode as most training code does."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def decode_files(decoder: Decoder, paths: Sequence[str]) -> tuple[float, int]:
    """Read and decode: (seconds of CPU, the number of files that could not be decoded)."""
    failed, start = 0, time.process_time()
    for path in paths:
        try:
            decoder(Path(path).read_bytes())
        except Exception:  # a damaged file may raise anything, and is counted
            failed += 1
    return time.process_time() - start, failed


def decoding(decoder: Decoder, paths: Sequence[str], jobs: int) -> Cost:
    """What it takes to decode all ``paths`` in ``jobs`` processes that are warm already."""
    tasks = [paths[i : i + FILES_A_TASK] for i in range(0, len(paths), FILES_A_TASK)]
    with ProcessPoolExecutor(jobs, env=ONE_THREAD) as pool:
        list(pool.map(partial(decode_files, decoder), tasks[: 4 * jobs]))
        start = time.perf_counter()
        done = list(pool.map(partial(decode_files, decoder), tasks))
        seconds = time.perf_counter() - start
    if failed := sum(failures for _, failures in done):
        print(f"{decoder.__name__}: {failed} of {len(paths)} files cannot be decoded so")
    return Cost(seconds, sum(cpu for cpu, _ in done))


# --- the command --------------------------------------------------------------------------------------


def command(source: Path, format: str, jobs: int) -> tuple[Cost, float]:
    """What all of `shardwright convert` takes, and the seconds of its conversion stage, as it says itself."""
    program = Path(sys.executable).with_name("shardwright")
    chosen = ("--format", format, "--jobs", str(jobs), "--json")
    with tempfile.TemporaryDirectory(dir=BENCH) as folder:
        start, cpu = time.perf_counter(), children_cpu()
        done = subprocess.run(
            [program, "convert", source, Path(folder, "out"), *chosen],
            capture_output=True,
            text=True,
            check=False,
        )
        whole = Cost(time.perf_counter() - start, children_cpu() - cpu)
    if done.returncode not in (0, 3):
        raise SystemExit(f"shardwright convert ended with {done.returncode}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    parts = [found] if "rows" in found else list(found.values())
    return whole, sum(part["seconds"] for part in parts)


def children_cpu() -> float:
    """Seconds of CPU of all processes that this one started, and they, and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- one worker ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    """What one worker takes: ms an image by stage, and in all without the profiler; to start; memory in bytes."""

    images: int
    stages: dict[str, float]
    unprofiled: Cost
    start_seconds: float
    imports_bytes: int
    peak_bytes: int
    environment: dict[str, str]


def shard_tasks(source: Path, work: Path, wanted: options.ConvertOptions) -> list[write.ShardTask]:
    """The first shards of the conversion of ``source``, of about PROFILED_IMAGES images, to write in ``work``."""
    tasks: list[write.ShardTask] = []
    for split, tree in run.scan_source(source, wanted).items():
        for shard in plan.plan_shards(len(tree), 1, wanted):
            if sum(len(task.paths) for task in tasks) >= PROFILED_IMAGES:
                return tasks
            paths = tuple(tree.paths[i] for i in shard.samples.tolist())
            labels = tuple(tree.labels[shard.samples].tolist())
            name = work / f"{split}-{shard.number:05d}"
            ids = tuple(map(path_to_id, paths))
            task = write.ShardTask(shard.number, shard.stem, name, tree.root, paths, ids, labels, wanted)
            tasks.append(task)
    return tasks


def warm_up(task: write.ShardTask) -> dict[str, str]:
    """Load all that a worker loads by decoding a picture or two; the versions of it."""
    for path in task.paths[:2]:
        with suppress(OSError, PictureError):
            pixels.decode((task.root / path).read_bytes(), task.options.pixels)
    return environment()


def write_shards(tasks: Sequence[write.ShardTask]) -> Cost:
    """Write the shards of ``tasks``, and remove them."""
    seconds = cpu = 0.0
    for task in tasks:
        start, start_cpu = time.perf_counter(), time.process_time()
        record = write.write_shard(task)
        seconds += time.perf_counter() - start
        cpu += time.process_time() - start_cpu
        if record.error:
            raise OSError(*record.error)
        for path in record.temporary:
            path.unlink()
    return Cost(seconds, cpu)


def memory_of(tasks: Sequence[write.ShardTask]) -> tuple[Cost, int, int]:
    """Write ``tasks``: what it takes, bytes of memory before, and bytes at the peak."""
    before = own_memory("VmRSS")
    return write_shards(tasks), before, own_memory("VmHWM")


def own_memory(field: str) -> int:
    """Bytes of this process: now (`VmRSS`) or at its peak (`VmHWM`); where there is no /proc, the peak."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    return next(int(line.split()[1]) * 1024 for line in status.open() if line.startswith(field))


def profile_of(tasks: Sequence[write.ShardTask]) -> dict[str, float]:
    """Write ``tasks`` under the profiler: stage -> seconds, `total` last."""
    profiler = cProfile.Profile()
    profiler.enable()
    write_shards(tasks)
    profiler.disable()
    entries = {entry.code: entry for entry in profiler.getstats()}

    def of(*functions: Any) -> float:
        return sum(entries[f.__code__].totaltime for f in functions if f.__code__ in entries)

    def below(caller: Any, builtin: str) -> float:
        calls = entries[caller.__code__].calls or ()
        return sum(call.totaltime for call in calls if isinstance(call.code, str) and builtin in call.code)

    decoders = of(jpeg.decode_strictly, modes.to_channels)
    probe, checksum = of(encode.probe), of(encode.checksummed)
    stages = {
        "read the file": of(write._read),
        "SHA-256 of the file": below(write._Rows.add, "sha256"),
        "open, header, EXIF (Pillow)": of(pixels.decode) - of(fit.fitted) - decoders,
        "decode": decoders,
        "resize": of(fit.fitted),
        "CRC-32 of the row": below(write._Rows.add, "crc32"),
        "mean and deviation": of(stats.Summing.add),
        "LZF, probe of the chunk": probe,
        "LZF or gzip, encode": of(encode.encode_chunk) - probe - checksum,
        "fletcher32 of the chunk": checksum,
        "write": of(guard.GuardedFile.write),
        "fsync": of(guard.GuardedFile.sync),
        "SHA-256 of the shard": of(store.shard_file),
    }
    total = of(write.write_shard)
    return {**stages, "all else": total - sum(stages.values()), "total": total}


def measure_worker(source: Path, format: str) -> Worker:
    """Measure one worker in processes of its own, as the converter starts them."""
    wanted = options.ConvertOptions(store=options.StoreOptions(format="npy" if format == "npy" else "hdf5"))
    with tempfile.TemporaryDirectory(dir=BENCH) as folder:
        tasks = shard_tasks(source, Path(folder), wanted)
        images = sum(len(task.paths) for task in tasks)
        start = time.perf_counter()
        with ProcessPoolExecutor(1, env=ONE_THREAD) as pool:
            versions = pool.submit(warm_up, tasks[0]).result()
            start_seconds = time.perf_counter() - start
            cost, before, peak = pool.submit(memory_of, tasks).result()
            profile = pool.submit(profile_of, tasks).result()
    stages = {stage: seconds / images * 1e3 for stage, seconds in profile.items()}
    unprofiled = Cost(*(seconds / images * 1e3 for seconds in cost))
    return Worker(images, stages, unprofiled, start_seconds, before, peak, versions)


# --- what is printed ----------------------------------------------------------------------------------


def machine() -> str:
    """CPU, cores that may be used, memory, system, load."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((s.partition(": ")[2] for s in lines if s.startswith("model name")), model)
    elif shutil.which("sysctl"):
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        model = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or model
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{model}, {joblib.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}; load average {os.getloadavg()[0]:.1f}"
    )


def table(title: str, rows: dict[str, list[float]], digits: int) -> None:
    """Print the median, least and most of each row."""
    print(f"\n{title:48}{'median':>8}  {'min':>7} - {'max':>7}")
    for name, values in rows.items():
        middle, least, most = (f"{f(values):.{digits}f}" for f in (statistics.median, min, max))
        print(f"  {name:46}{middle:>8}  {least:>7} - {most:>7}")


def print_worker(worker: Worker) -> None:
    """Print where the time of one worker goes, and what memory it takes."""
    total = worker.stages["total"]
    print(f"\n{f'one worker, ms an image ({worker.images} images)':48}{'ms':>8}  share")
    for stage, ms in worker.stages.items():
        print(f"  {stage:46}{ms:8.3f}  {ms / total:5.1%}")
    print(f"  {'total without the profiler':46}{worker.unprofiled.seconds:8.3f}")
    print(f"  {'  of CPU':46}{worker.unprofiled.cpu:8.3f}")
    extra = (worker.peak_bytes - worker.imports_bytes) / 1e6
    print(
        f"\na worker is ready after {worker.start_seconds:.1f} s; its memory: {worker.imports_bytes / 1e6:.0f} MB "
        f"with all imports, {extra:.0f} MB more at its peak"
    )


def measure(source: Path, format: str, jobs: int, rounds: int) -> None:
    """Run all rounds and print what was found."""
    scans = run.scan_source(source, options.ConvertOptions())
    paths = [str(tree.root / path) for tree in scans.values() for path in tree.paths]
    source_mb = sum(int(tree.sizes.sum()) for tree in scans.values()) / 1e6
    print(machine())
    print(f"{len(paths)} pictures, {source_mb:.1f} MB, in '{os.path.relpath(source)}'")
    print(f"to {format} by {jobs} jobs, {rounds} rounds")
    sum(len(Path(path).read_bytes()) for path in paths)  # into the page cache, for all alike
    worker = measure_worker(source, format)
    print(", ".join(f"{name} {version}" for name, version in worker.environment.items()))

    ours, pillow, whole = (list[Cost]() for _ in range(3))
    stage_seconds: list[float] = []

    def convert() -> None:
        cost, stage = command(source, format, jobs)
        whole.append(cost)
        stage_seconds.append(stage)

    steps: list[Callable[[], None]] = [
        lambda: ours.append(decoding(with_simplejpeg, paths, jobs)),
        convert,
        lambda: pillow.append(decoding(with_pillow, paths, jobs)),
    ]
    for number in range(rounds):
        for step in steps if number % 2 == 0 else reversed(steps):
            step()

    def rates(seconds: Iterable[float]) -> list[float]:
        return [len(paths) / max(s, 1e-9) for s in seconds]

    decoded = rates(cost.seconds for cost in ours)
    images_per_second = {
        "shardwright convert, the whole command": rates(cost.seconds for cost in whole),
        "its conversion stage (from --json)": rates(stage_seconds),
        # The pools that decode are warm when their clock starts, the command's workers are not.
        "  less the start of a worker": rates(seconds - worker.start_seconds for seconds in stage_seconds),
        "decoding alone, simplejpeg": decoded,
        "decoding alone, Pillow": rates(cost.seconds for cost in pillow),
    }
    table("images/s", images_per_second, 0)
    shares = {
        name: [rate / base for rate, base in zip(found, decoded, strict=True)]
        for name, found in images_per_second.items()
        if found is not decoded
    }
    table("as a share of decoding alone with simplejpeg", shares, 2)
    cpu = {
        "shardwright convert, the whole command": whole,
        "decoding alone, simplejpeg": ours,
        "decoding alone, Pillow": pillow,
    }
    table("CPU, ms an image", {n: [c.cpu / len(paths) * 1e3 for c in costs] for n, costs in cpu.items()}, 2)
    print_worker(worker)


def main() -> None:
    """Parse the command line, draw the pictures if need be, and measure."""
    parser = argparse.ArgumentParser(description="Measure `shardwright convert` against decoding alone.")
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help=f"tree of pictures (default: {SIZE}, drawn)"
    )
    parser.add_argument("--pictures", type=int, default=2000, metavar="N", help="how many to draw")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--format", choices=["hdf5", "npy"], default="hdf5")
    parser.add_argument("--jobs", type=int, default=joblib.cpu_count(), metavar="N")
    chosen = parser.parse_args()
    if min(chosen.rounds, chosen.jobs) < 1:
        parser.error("--rounds and --jobs: expected at least 1")
    BENCH.mkdir(parents=True, exist_ok=True)
    source: Path = chosen.source or BENCH / f"source-{chosen.pictures}"
    if not chosen.source:
        drawer = REPOSITORY / "examples" / "draw_sample.py"
        wanted: list[str | Path] = [source, "--pictures", str(chosen.pictures), "--size", SIZE]
        if subprocess.run([sys.executable, "-P", drawer, *wanted], check=False).returncode:
            sys.exit(1)
    try:
        measure(source, chosen.format, chosen.jobs, chosen.rounds)
    except ShardwrightError as error:
        sys.exit(f"convert.py: {error}")


if __name__ == "__main__":
    main()
