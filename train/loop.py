"""The training loop on the host: steps, looks at the device, validations, checkpoints, and when to stop.

Everything that happens at a step is decided by the number of steps taken, skipped ones included, which every process
knows without asking a device. What a device knows (whether an update changed the weights) is learnt at the next look.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from draftcache.train.checkpoint import Best, Progress, Run
from draftcache.train.guards import StopRequest, is_stuck, naming_memory, stuck_error, too_good
from draftcache.train.meter import Meter, disk_limit, speed_columns
from draftcache.train.order import MicroBatch, Step
from draftcache.train.report import Row, RunLog, metrics_row, validation_row
from draftcache.train.saver import Saver
from draftcache.train.settings import TrainConfig
from draftcache.train.slots import Slots
from draftcache.train.step import EagerStep, Stepper, log_row_names, sum_names
from draftcache.train.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the loop ended."""

    progress: Progress
    reason: str  # "finished", "stopped" or "patience"
    signal: int | None  # that asked this process to stop
    metrics: Row  # of the last step, empty if there was none
    validation: Row  # of the last validation, empty if there was none


class Schedule:
    """This process's micro-batches in the order in which the loop takes them: steps, and validations where due.

    The ring's readers iterate over it; `steps` tells the loop what it is about to take.
    """

    def __init__(
        self, steps: Iterator[Step], held_out: list[MicroBatch], run: Run, config: TrainConfig, world: World
    ) -> None:
        self.steps: deque[Step] = deque()
        self.held_out = held_out[world.rank :: world.size]
        self._validates = bool(held_out)
        self._source = steps
        self._run, self._config, self._world = run, config, world

    def validation_due(self, taken: int) -> bool:
        """Whether a validation follows the step number `taken`, skipped ones counted."""
        due = taken % self._config.validation.validate_every == 0 or taken >= self._run.steps
        return self._validates and taken > 0 and due

    def micro_batches(self, progress: Progress) -> Iterator[MicroBatch]:
        """Endless, from `progress` on; begins with the validation that a stopped run left out."""
        taken = progress.taken
        if self.validation_due(taken) and progress.validated < taken:
            yield from self.held_out
        for step in self._source:
            self.steps.append(step)
            yield from step.share(self._world.rank, self._world.size)
            taken += 1
            if self.validation_due(taken):
                yield from self.held_out


class Loop:
    """One run from its beginning or resumption to its end."""

    def __init__(
        self,
        run: Run,
        config: TrainConfig,
        world: World,
        eager: EagerStep,
        stepper: Stepper,
        schedule: Schedule,
        saver: Saver,
        log: RunLog,
        progress: Progress,
        slots: Slots,
        meter: Meter,
    ) -> None:
        self._run, self._config, self._world = run, config, world
        self._eager, self._stepper = eager, stepper
        self._schedule, self._saver, self._log = schedule, saver, log
        self._slots, self._meter = slots, meter
        self._progress = progress  # as of the last look at the device, but for the cursor
        self._begin, self._first_step = progress.taken, progress.step + 1
        self._saved = progress
        self._unread: list[int] = []  # tokens of the steps since the last look
        self._request = StopRequest()
        self._warned = False
        self._disk_was_limit = False
        self._metrics: Row = {}
        self._validation: Row = {}

    def run(self) -> End:
        """All steps and validations; the last checkpoint is written when this returns."""
        with self._request:
            if self._schedule.validation_due(self._progress.taken) and self._progress.validated < self._begin:
                self._validate()
            if self._out_of_patience():
                return self._end("patience")
            while not self._finished():
                self._step()
                stopping = self._world.any(self._request.signal is not None)
                reason = "stopped" if stopping else self._after_step()
                if reason:
                    return self._end(reason)
        return self._end("finished")

    @property
    def _taken(self) -> int:
        return self._progress.taken + len(self._unread)

    def _finished(self) -> bool:
        """Whether all steps are done; looks at the device if that may be so."""
        if self._progress.step + len(self._unread) < self._run.steps:
            return False
        self._look()
        return self._progress.step >= self._run.steps

    def _step(self) -> None:
        step = None
        with naming_memory("a step", "--token-budget, --anchors or --num-layers"):
            for _ in range(-(-self._run.micro_batches // self._world.size)):
                batch = self._slots.take()
                step = step or self._schedule.steps.popleft()
                self._stepper.micro_step(batch, self._slots.release)
            self._saver.before_update()
            self._stepper.update()
        assert step is not None, "a step without micro-batches"
        self._unread.append(step.real_tokens)
        self._progress = dataclasses.replace(self._progress, cursor=step.after)

    def _after_step(self) -> str | None:
        """Look, validate and save where it is due; a reason to stop, or None."""
        validating = self._schedule.validation_due(self._taken)
        saving = self._config.save_every is not None and self._taken % self._config.save_every == 0
        first = self._taken == self._begin + 1
        if first or validating or saving or len(self._unread) == self._config.log_every:
            self._look()
        if first:
            self._log.say(f"first step after {self._meter.since_began():.1f} s")
        if validating and self._validate():
            saving = True
        if saving:
            self._save()
        return "patience" if self._out_of_patience() else None

    def _out_of_patience(self) -> bool:
        patience = self._config.validation.patience
        return patience is not None and self._progress.validations_since_best >= patience

    def _look(self) -> None:
        """Read the log rows since the last look, in one copy, and write them down."""
        if not self._unread:
            return
        log = self._eager.log.cpu()
        seconds, traffic = self._meter.restart(), self._slots.traffic()
        names, size = log_row_names(self._run.drafter.block_size), self._run.drafter.block_size
        rows: list[Row] = []
        stuck = 0
        for tokens in self._unread:
            before = self._progress
            values = dict(zip(names, log[(before.taken - self._begin) % len(log)].tolist(), strict=True))
            applied = int(values["skipped"]) == before.skipped
            self._progress = dataclasses.replace(
                before,
                step=before.step + applied,
                skipped=before.skipped + (not applied),
                skipped_in_a_row=0 if applied else before.skipped_in_a_row + 1,
            )
            rows.append(metrics_row(before.step + 1, values, applied, tokens, size))
            stuck = max(stuck, self._progress.skipped_in_a_row)
        self._unread.clear()
        speed = speed_columns(rows, seconds, traffic)
        rows = [row | speed for row in rows]
        self._log.steps(rows)
        self._metrics = rows[-1]
        self._warn(rows)
        if is_stuck(stuck):
            self._save()
            self._saver.wait()
            raise stuck_error(stuck, rows[-1]["step"])

    def _warn(self, rows: list[Row]) -> None:
        for row in rows:
            warning = too_good(row["step"], row["accepted_length"], self._run.drafter.block_size)
            if warning and not self._warned:
                self._warned = True
                self._log.say(warning)

        limit = disk_limit(rows[-1]["wait_share"], rows[-1]["read_gb_s"])
        warming_up = rows[0]["step"] == self._first_step
        if limit and not self._disk_was_limit and not warming_up:
            self._log.say(limit)
        self._disk_was_limit = limit is not None and not warming_up

    def _validate(self) -> bool:
        """Evaluate the held-out samples, over all processes; whether this is the best so far."""
        for _ in self._schedule.held_out:
            self._stepper.evaluate(self._slots.take(), self._slots.release)
        sums = self._eager.held_out_sums
        self._world.sum(sums)
        values = dict(zip(sum_names(self._run.drafter.block_size), sums.tolist(), strict=True))
        sums.zero_()
        self._slots.traffic()
        self._meter.restart()
        p = self._progress
        row = validation_row(p, values, self._run.drafter.block_size)
        self._validation = row
        self._log.validation(row)
        accepted = row["accepted_length"]
        better = accepted is not None and (p.best is None or accepted > p.best.accepted_length)
        self._progress = dataclasses.replace(
            p,
            validated=p.taken,
            best=Best(step=p.step, accepted_length=accepted) if better else p.best,
            validations_since_best=0 if better else p.validations_since_best + 1,
        )
        return better

    def _save(self) -> None:
        if self._progress != self._saved:
            self._log.sync()
            self._saver.save(self._progress)
            self._saved = self._progress

    def _end(self, reason: str) -> End:
        self._look()
        self._save()
        self._saver.wait()
        return End(
            progress=self._progress,
            reason=reason,
            signal=self._request.signal,
            metrics=self._metrics,
            validation=self._validation,
        )
