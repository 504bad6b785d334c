"""The ring under random schedules, with failing and dying readers, and runs whose store is lost meanwhile."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from draftcache.common.errors import DamageError, TrainingError
from draftcache.common.shard import RowReader
from draftcache.common.store import Store
from draftcache.tests.commands import run
from draftcache.tests.runs import outcome, small_run, steps_until
from draftcache.tests.stores import flip_bit
from draftcache.train import ring as rings
from draftcache.train.batch import FlatBatch, batch_bytes, view_batch
from draftcache.train.checkpoint import read_progress
from draftcache.train.order import Batching, MicroBatch, context_shapes, epoch_batches
from draftcache.train.ring import BUFFERS, THREADS, Filled, Ring, State, clear_batch, fill_row
from draftcache.train.run import train
from draftcache.train.settings import TrainConfig
from draftcache.train.setup import bucket_index
from draftcache.train.step import EagerStep

KIND = Batching(kind="bucket", token_budget=256)
CYCLE = [State.FREE, State.FILLING, State.READY, State.IN_TRANSIT]


def endless(store: Store) -> Iterator[MicroBatch]:
    """Micro-batches of epoch after epoch, an empty one now and then."""
    epoch = 0
    while True:
        batches = epoch_batches(bucket_index(store), KIND, 0, epoch)
        yield from batches
        yield MicroBatch(batches[0].tokens, epoch, ())
        epoch += 1


def longest(store: Store) -> int:
    return max(context_shapes(bucket_index(store), KIND))


def open_ring(store: Store) -> Ring:
    return Ring(store, endless(store), longest(store), pinned=False)


class Twin:
    """What a micro-batch must hold, filled by one thread into memory of its own."""

    def __init__(self, store: Store) -> None:
        self._store, self._reader = store, RowReader()
        self._bytes = store.manifest.record.record_bytes
        self._block = torch.zeros(batch_bytes(longest(store), self._bytes), dtype=torch.uint8)

    def check(self, micro_batch: MicroBatch, found: FlatBatch) -> None:
        wanted = view_batch(self._block, micro_batch.tokens, self._bytes)
        clear_batch(micro_batch, wanted)
        for number in range(len(micro_batch.rows)):
            fill_row(self._store, self._reader, micro_batch, number, wanted)
        for name in ("records", "input_ids", "samples", "positions", "documents", "loss_mask", "epoch"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name


class Watch:
    """Slows readers down at random, and notes who writes where and how buffers change their states."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self.held: set[int] = set()  # buffers that the test has in transit
        self.reads = 0
        self.moves: dict[int, list[State]] = {}
        self._rng, self._lock = random.Random(seed), threading.Lock()
        move = rings._Buffer.move

        def noted(buffer: Any, old: State, new: State) -> None:
            self.moves.setdefault(id(buffer), []).append(new)
            move(buffer, old, new)

        patch.setattr(rings._Buffer, "move", noted)
        patch.setattr(rings, "fill_row", self._fill_row)

    def _fill_row(self, store: Store, reader: RowReader, m: MicroBatch, number: int, batch: FlatBatch) -> int:
        address = batch.block.data_ptr()
        with self._lock:
            self.reads += 1
            delay = self._rng.choice([0.0, 0.0, 0.0, 1e-4, 5e-4])
        time.sleep(delay)
        assert address not in self.held
        read = fill_row(store, reader, m, number, batch)
        assert address not in self.held
        return read


@pytest.mark.parametrize("seed", range(2))
def test_no_buffer_is_ever_in_two_states(store: Store, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng, watch, twin = random.Random(seed), Watch(monkeypatch, seed), Twin(store)
    wanted, held, operations = endless(store), list[Filled](), 0
    addresses: set[int] = set()
    with open_ring(store) as ring:
        while operations < 2500:
            operations += 1
            states = Counter(ring.states)
            assert sum(states.values()) == BUFFERS
            assert states[State.IN_TRANSIT] == len(held)
            if len(held) < BUFFERS and rng.random() < 0.5:
                filled = ring.take()
                assert filled.micro_batch == next(wanted)
                assert filled.batch.block.data_ptr() not in watch.held
                watch.held.add(filled.batch.block.data_ptr())
                addresses.add(filled.batch.block.data_ptr())
                held.append(filled)
            elif held:
                filled = held.pop(rng.randrange(len(held)))
                twin.check(filled.micro_batch, filled.batch)  # nobody wrote into it meanwhile
                watch.held.remove(filled.batch.block.data_ptr())
                ring.give_back(filled)
    assert operations + watch.reads > 3000
    assert len(addresses) == len(watch.moves) == BUFFERS
    for moves in watch.moves.values():
        assert moves == [CYCLE[(i + 1) % 4] for i in range(len(moves))]


def test_a_buffer_cannot_be_given_back_twice(store: Store) -> None:
    with open_ring(store) as ring:
        filled = ring.take()
        ring.give_back(filled)
        with pytest.raises(AssertionError, match="cannot go on as free"):
            ring.give_back(filled)


def failing_at(patch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Let the `number`th row that is read from now on, and all after it, fail."""
    reads, lock = 0, threading.Lock()

    def fill(*args: Any) -> int:
        nonlocal reads
        with lock:
            reads += 1
            fails = reads >= number
        if fails:
            raise error
        return fill_row(*args)

    patch.setattr(rings, "fill_row", fill)


def use_up(ring: Ring) -> None:
    """Take micro-batches until something is wrong."""
    while True:
        ring.give_back(ring.take())


def check_all(ring: Ring, twin: Twin, wanted: Iterator[MicroBatch], rows: list[int]) -> None:
    """The same, with a look at each; `rows` gets the number of rows of each."""
    while True:
        filled = ring.take()
        assert filled.micro_batch == next(wanted)
        rows.append(len(filled.micro_batch.rows))
        twin.check(filled.micro_batch, filled.batch)
        ring.give_back(filled)


@pytest.mark.parametrize("error", [DamageError("x", needed="y", do="z"), OSError("gone"), SystemExit(), MemoryError()])
@pytest.mark.parametrize("number", [1, 2, 17])
def test_a_readers_error_is_raised_in_the_loop_after_what_was_read(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException, number: int
) -> None:
    failing_at(monkeypatch, number, error)
    twin, wanted = Twin(store), endless(store)
    rows: list[int] = []
    with open_ring(store) as ring, pytest.raises((DamageError, TrainingError)) as raised:
        check_all(ring, twin, wanted, rows)
    assert sum(rows) < number
    if isinstance(error, DamageError):
        assert raised.value is error
    else:
        samples = ", ".join(str(row.sample) for row in next(wanted).rows)
        assert f"micro-batch of samples {samples}: {type(error).__name__}" in str(raised.value)
        assert "train --resume" in str(raised.value)
    assert not any(thread.name.startswith("reader-") for thread in threading.enumerate())


def test_an_error_of_the_order_is_raised_in_the_loop(store: Store) -> None:
    def two_then_error() -> Iterator[MicroBatch]:
        source = endless(store)
        yield next(source)
        yield next(source)
        raise DamageError("the list is torn", needed="it", do="mend it")

    with Ring(store, two_then_error(), longest(store), pinned=False) as ring:
        for _ in range(2):
            ring.give_back(ring.take())
        with pytest.raises(DamageError, match="the list is torn"):
            ring.take()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("number", [0, THREADS - 1])
def test_a_thread_that_is_gone_stops_the_loop(store: Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    claim = Ring._claim

    def vanishing(ring: Ring) -> Any:
        if threading.current_thread().name == f"reader-{number}":
            raise SystemExit  # what ends a thread without a trace
        return claim(ring)

    monkeypatch.setattr(Ring, "_claim", vanishing)
    with open_ring(store) as ring, pytest.raises(TrainingError, match="its thread is gone"):
        use_up(ring)


def long_run(store: Store, out: Path) -> TrainConfig:
    return small_run(store, out, steps=30, save_every=2)


def after_update(patch: pytest.MonkeyPatch, count: int, work: Callable[[], object]) -> None:
    """Let `work` follow the `count`th update."""
    update, done = EagerStep.update, 0

    def counting(step: EagerStep) -> None:
        nonlocal done
        update(step)
        done += 1
        if done == count:
            work()

    patch.setattr(EagerStep, "update", counting)


@pytest.fixture(scope="module")
def uninterrupted(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to which nothing happened."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(long_run(store, out))
    return out


@pytest.mark.parametrize("what", ["flipped bit", "renamed folder", "dead reader"])
def test_a_run_whose_store_is_lost_stops_and_goes_on_after_repair(
    capsys: pytest.CaptureFixture[str], copied: Store, uninterrupted: Path, tmp_path: Path, what: str
) -> None:
    out, away = tmp_path / "run", tmp_path / "away"
    shard = copied.buckets[128].shard_path(1)
    with pytest.MonkeyPatch.context() as patch:
        steps_until(patch, 1)
        train(long_run(copied, out))
    with pytest.MonkeyPatch.context() as patch:
        if what == "flipped bit":
            spoil: Callable[[], object] = partial(flip_bit, shard, 5000)
            words = str(shard)
        elif what == "renamed folder":
            spoil = partial(copied.path.rename, away)
            words = f"{copied.path} is no longer there"
        else:
            spoil = partial(failing_at, patch, 1, SystemExit())
            words = "a reader of the store died"
        after_update(patch, 5, spoil)
        stopped = run(capsys, "train", "--resume", out)
    assert stopped.code == 2
    assert words in stopped.message
    assert "Traceback" not in stopped.err
    assert stopped.err.count("; needed: ") == 1
    steps = [read_progress(path).step for path in sorted(out.glob("checkpoint-*"))]
    assert steps[-1] >= 4
    if what == "flipped bit":
        flip_bit(shard, 5000)
    elif what == "renamed folder":
        away.rename(copied.path)
    assert run(capsys, "train", "--resume", out).code == 0
    assert outcome(out) == outcome(uninterrupted)
