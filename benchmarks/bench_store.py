"""How fast shards are read and written at full width, with every byte checked, beside raw disk and other engines.

The physics: a record of 5 taps and the last hidden state of a 5,120-wide target is 61,440 bytes. A disk gives what it
gives; what an engine may add is copies and Python, seen as CPU-seconds per GB. Reading verified must cost at most 0.20
of them and reach 0.95 of what raw O_DIRECT reads reach in the same round; writing 0.25 and 0.90.

    python -m draftcache.benchmarks.bench_store FOLDER [--rounds 5] [--shards 2] [--bucket 1728]

FOLDER lies on the disk to be measured and needs about 14 GB per shard. Before every round all files are evicted from
the page cache and `mincore` must find none of their pages there. GB are 1e9 bytes of real tokens; medians over rounds.
zarrs, tensorstore and safetensors take part where they are installed.
"""

import argparse
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import zarr
from tabulate import tabulate

from draftcache.benchmarks import disk
from draftcache.benchmarks.disk import REQUEST_BYTES, evict, in_threads
from draftcache.benchmarks.rows import append_row
from draftcache.common.layout import DEFAULT_CEILINGS, DEFAULT_TOKEN_BUDGET, ShardGeometry, rows_per_batch
from draftcache.common.memory import aligned_bytes
from draftcache.common.record import CODECS, TEACHERS, record_spec
from draftcache.common.shard import Bytes, RowReader, ShardFile, write_shard
from draftcache.common.store import BucketSamples, bucket_path, create_store

TAPS, HIDDEN = 5, 5120
THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The store that is measured, and one padded batch of records as it lies in memory."""

    folder: Path
    geometry: ShardGeometry
    shards: list[ShardFile]
    records: Bytes  # [rows, stride, R], the content of every shard

    @property
    def real_bytes(self) -> int:
        """Bytes of real tokens in all shards."""
        return sum(sum(shard.lengths) for shard in self.shards) * self.geometry.record_bytes

    def rows(self) -> list[tuple[int, int]]:
        """(shard, row) of every row."""
        return [(number, row) for number, shard in enumerate(self.shards) for row in range(len(shard.lengths))]


def build(folder: Path, shards: int, ceiling: int) -> Bench:
    """Make the store, with lengths spread over the bucket; values do not matter, since nothing is compressed."""
    record = record_spec(TAPS, HIDDEN, "bf16", "last")
    rows = rows_per_batch(DEFAULT_TOKEN_BUDGET, ceiling)
    geometry = ShardGeometry(rows=rows, ceiling=ceiling, record_bytes=record.record_bytes)
    below = max((c for c in DEFAULT_CEILINGS if c < ceiling), default=0)
    rng = np.random.default_rng(0)
    lengths = [rng.integers(below + 1, ceiling + 1, rows).tolist() for _ in range(shards)]
    flat = [length for shard in lengths for length in shard]
    samples = BucketSamples(
        ceiling=ceiling,
        samples=np.arange(len(flat)),
        offsets=np.concatenate([[0], np.cumsum(flat)]),
        input_ids=np.zeros(sum(flat), dtype=np.int32),
        loss_mask=np.ones(sum(flat), dtype=np.uint8),
    )
    create_store(folder / "store", record, {ceiling: rows}, [samples])
    records = aligned_bytes(rows * geometry.row_bytes)
    tile = rng.integers(0, 256, 1 << 26, dtype=np.uint8)
    for begin in range(0, len(records), len(tile)):
        records[begin : begin + len(tile)] = tile[: len(records) - begin]
    padded = records.reshape(rows, geometry.stride, record.record_bytes)
    written = []
    for number, shard_lengths in enumerate(lengths):
        path = folder / "store" / bucket_path(ceiling) / "records" / "c" / str(number) / "0" / "0"
        digests = write_shard(path, geometry, padded, shard_lengths)
        written.append(
            ShardFile(
                path=path,
                geometry=geometry,
                lengths=tuple(shard_lengths),
                samples=tuple(range(rows)),
                digests=digests,
            )
        )
    return Bench(folder=folder, geometry=geometry, shards=written, records=padded)


def read_raw(bench: Bench, _out: Bytes) -> None:
    """The ceiling: the same files, whole, by O_DIRECT reads of 8 MiB in threads, nothing checked."""
    disk.read_raw([shard.path for shard in bench.shards], THREADS)


def read_draftcache(bench: Bench, out: Bytes) -> None:
    """Every row by `RowReader`, every byte checked."""
    rows = bench.rows()

    def read(thread: int) -> None:
        reader = RowReader()
        place = out[thread * bench.geometry.row_bytes : (thread + 1) * bench.geometry.row_bytes]
        for shard, row in rows[thread::THREADS]:
            reader.read_row(bench.shards[shard], row, place)

    in_threads(read, THREADS)


def read_zarr(bench: Bench, out: Bytes) -> None:
    """zarr-python's own pipeline, one row after another in threads."""
    array = zarr.open_group(str(bench.folder / "store"), mode="r")[f"{bucket_path(bench.geometry.ceiling)}/records"]
    assert isinstance(array, zarr.Array)

    def read(thread: int) -> None:
        for index in range(thread, array.shape[0], THREADS):
            out[: array.shape[1] * array.shape[2]] = np.asarray(array[index]).reshape(-1)

    in_threads(read, THREADS)


def read_zarrs(bench: Bench, out: Bytes) -> None:
    """zarr-python with the zarrs pipeline."""
    import zarrs  # noqa: F401 - importing it registers the pipeline

    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        read_zarr(bench, out)


def read_tensorstore(bench: Bench, out: Bytes) -> None:
    """tensorstore, one row after another, into an array that exists already."""
    import tensorstore

    path = str(bench.folder / "store" / bucket_path(bench.geometry.ceiling) / "records")
    array = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}, read=True).result()
    place = out[: array.shape[1] * array.shape[2]].reshape(array.shape[1:])
    for index in range(array.shape[0]):
        tensorstore.array(place, copy=False).write(array[index]).result()


def read_safetensors(bench: Bench, out: Bytes) -> None:
    """One safetensors file per sample, as other trainers keep them; nothing is checked."""
    from safetensors import safe_open

    rows = bench.rows()

    def read(thread: int) -> None:
        place = out[thread * bench.geometry.row_bytes : (thread + 1) * bench.geometry.row_bytes]
        for shard, row in rows[thread::THREADS]:
            with safe_open(_sample_file(bench, shard, row), framework="np") as file:
                values = file.get_tensor("records").reshape(-1)
                place[: len(values)] = values

    in_threads(read, THREADS)


def write_safetensors(bench: Bench) -> None:
    """One file per sample, flushed."""
    from safetensors.numpy import save_file

    (bench.folder / "safetensors").mkdir(exist_ok=True)
    for shard, row in bench.rows():
        path = _sample_file(bench, shard, row)
        save_file({"records": bench.records[row, : bench.shards[shard].lengths[row]]}, path)
        _flush(path)


def write_draftcache(bench: Bench) -> None:
    """`write_shard`, durable when it returns."""
    for number, shard in enumerate(bench.shards):
        write_shard(bench.folder / f"written-{number}", bench.geometry, bench.records, shard.lengths)


def write_raw(bench: Bench) -> None:
    """The ceiling: the same number of bytes by O_DIRECT writes of 8 MiB, flushed."""
    for number, shard in enumerate(bench.shards):
        size, path = shard.size, bench.folder / f"raw-{number}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
        flat = bench.records.reshape(-1)
        for begin in range(0, size, REQUEST_BYTES):
            os.pwritev(fd, [flat[begin : min(begin + REQUEST_BYTES, size)].data], begin)
        os.fsync(fd)
        os.close(fd)


def write_zarr(bench: Bench) -> None:
    """zarr-python's own pipeline with the same chunks, flushed."""
    g = bench.geometry
    path = bench.folder / "zarr-written"
    array = zarr.create_array(
        str(path),
        shape=(len(bench.shards) * g.rows, g.ceiling, g.record_bytes),
        dtype="uint8",
        chunks=(1, 64, g.record_bytes),
        shards=(1, g.stride, g.record_bytes),
        compressors=[zarr.codecs.Crc32cCodec()],
        overwrite=True,
    )
    for shard, row in bench.rows():
        length = bench.shards[shard].lengths[row]
        array[shard * g.rows + row, :length] = bench.records[row, :length]
    for file in path.rglob("0"):
        if file.is_file():
            _flush(file)


READERS: dict[str, tuple[Callable[[Bench, Bytes], None], str]] = {
    "raw": (read_raw, "os"),
    "draftcache": (read_draftcache, "os"),
    "zarr": (read_zarr, "zarr"),
    "zarrs": (read_zarrs, "zarrs"),
    "tensorstore": (read_tensorstore, "tensorstore"),
    "safetensors": (read_safetensors, "safetensors"),
}
WRITERS: dict[str, Callable[[Bench], None]] = {
    "raw": write_raw,
    "draftcache": write_draftcache,
    "zarr": write_zarr,
    "safetensors": write_safetensors,
}


def measure(work: Callable[[], None], real_bytes: int) -> tuple[float, float]:
    """GB/s and CPU-seconds per GB of real tokens."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return real_bytes / seconds / 1e9, cpu / (real_bytes / 1e9)


def compare(bench: Bench, rounds: int) -> None:
    """All engines in turn, round after round; ratios are to the raw engine of the same round."""
    out = aligned_bytes(2 * bench.geometry.row_bytes)
    out.fill(1)
    write_safetensors(bench)
    readers = {name: read for name, (read, package) in READERS.items() if find_spec(package)}
    for verb, engines in (("write", WRITERS), ("read", readers)):
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, engine in engines.items():
                evict(bench.folder)
                work = (lambda e=engine: e(bench, out)) if verb == "read" else (lambda e=engine: e(bench))
                found[name].append(measure(work, bench.real_bytes))
        report(verb, found)


def report(verb: str, found: dict[str, list[tuple[float, float]]]) -> None:
    """A table, then one row per engine."""
    lines = []
    for name, results in found.items():
        speeds, cpu = zip(*results, strict=True)
        ratios = [speed / raw for speed, (raw, _) in zip(speeds, found["raw"], strict=True)]
        metrics = {
            "gb_s": statistics.median(speeds),
            "x_raw": statistics.median(ratios),
            "cpu_s_per_gb": statistics.median(cpu),
        }
        lines.append([name, *metrics.values(), min(speeds), max(speeds)])
        append_row("bench_store", f"{verb}/full-width/{name}", metrics)
    print(tabulate(lines, headers=[verb, "GB/s", "x raw", "CPU-s/GB", "min", "max"], floatfmt=".3f"))


def padding_and_bytes() -> None:
    """What padding costs on disk in every full-scale bucket, and bytes per token of every codec and teacher."""
    for ceiling, below in zip(DEFAULT_CEILINGS, (0, *DEFAULT_CEILINGS), strict=False):
        spec = record_spec(TAPS, HIDDEN, "bf16", "last")
        rows = rows_per_batch(DEFAULT_TOKEN_BUDGET, ceiling)
        geometry = ShardGeometry(rows=rows, ceiling=ceiling, record_bytes=spec.record_bytes)
        lengths = np.random.default_rng(0).integers(below + 1, ceiling + 1, 200 * rows).tolist()
        stored = sum(geometry.file_bytes(lengths[i : i + rows]) for i in range(0, len(lengths), rows))
        append_row("bench_store", f"padding/{ceiling}", {"x_real": stored / (sum(lengths) * spec.record_bytes)})
    for codec, teacher in ((c, t) for c in CODECS for t in TEACHERS):
        name = {"top": "top64"}.get(teacher, teacher)
        spec = record_spec(TAPS, HIDDEN, codec, teacher)
        append_row("bench_store", f"bytes/{codec}+{name}", {"bytes_per_token": spec.record_bytes})


def _sample_file(bench: Bench, shard: int, row: int) -> Path:
    return bench.folder / "safetensors" / f"{shard}-{row}.safetensors"


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, build, compare, clean up."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--bucket", type=int, default=1728)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True)
    try:
        compare(build(options.folder, options.shards, options.bucket), options.rounds)
        padding_and_bytes()
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
