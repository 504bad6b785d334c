"""The processes of one training run, as torchrun starts them: who am I, sum over all of us, agree with all of us.

Tensors on CUDA are summed by NCCL, those on the CPU by gloo. So what the hosts tell each other (stop requests, errors,
the run's description) never waits for a device.

    RANK, WORLD_SIZE, LOCAL_RANK     set by torchrun; a process without them is alone
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from draftcache.common.errors import DraftcacheError, TrainingError, UsageError, first_line

T = TypeVar("T")
HOST_PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others before it gives up: a checkpoint of another one may take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among its peers."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes logs and checkpoints."""
        return self.rank == 0

    def sum(self, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        """Sum a tensor over all processes, in place; on the wire in `dtype` if given. May be captured."""
        if self.size == 1:
            return
        sent = tensor if dtype in (None, tensor.dtype) else tensor.to(dtype)
        with self._in_touch():
            dist.all_reduce(sent)
        if sent is not tensor:
            tensor.copy_(sent)

    def copy_from_first(self, tensors: list[Tensor]) -> None:
        """Overwrite every process's tensors with the first one's."""
        if self.size > 1:
            with self._in_touch():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; every process must ask."""
        return flag if self.size == 1 else any(self._gather(flag))

    def together(self, work: Callable[[], T]) -> T:
        """Do the same work everywhere; if it fails with a DraftcacheError anywhere, raise that error everywhere."""
        if self.size == 1:
            return work()
        result, error = None, None
        try:
            result = work()
        except DraftcacheError as raised:
            error = raised
        failed = [(rank, e) for rank, e in enumerate(self._gather(_plain(error))) if e is not None]
        if error is not None:
            raise error
        if failed:
            rank, e = failed[0]
            raise TrainingError(f"process {rank}: {e['found']}", needed=e["needed"], do=e["do"])
        return result  # type: ignore[return-value]  # None only if `work` returned it

    def from_first(self, work: Callable[[], Any]) -> Any:
        """What `work` returns in the first process, a JSON value, in every process; its error is raised everywhere."""
        value = self.together(lambda: work() if self.first else None)
        return value if self.size == 1 else self._gather(value)[0]

    def _gather(self, value: Any) -> list[Any]:
        """Every process's JSON value."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with self._in_touch():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(data)]))
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = data
            held = [torch.zeros_like(padded) for _ in range(self.size)]
            dist.all_gather(held, padded)
        return [json.loads(bytes(part[: int(size)].tolist()).decode()) for part, size in zip(held, sizes, strict=True)]

    @contextmanager
    def _in_touch(self) -> Iterator[None]:
        """Turn the silence of another process into an error that says so."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise TrainingError(
                f"process {self.rank} of {self.size} lost touch with the others: {first_line(error)}",
                needed="every process of the run",
                do="look at what the other processes said, then go on with `draftcache train --resume`",
            ) from None


ALONE = World()


def local_device(device: str) -> str:
    """The device of this process: the one that torchrun's LOCAL_RANK numbers, where `device` is a bare "cuda"."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device


@contextmanager
def join_world() -> Iterator[World]:
    """Meet the other processes that torchrun started, and leave them at the end."""
    try:
        size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    except ValueError:
        size, rank = 0, 0
    if size < 1 or not 0 <= rank < size:
        raise UsageError(
            f"RANK {os.environ.get('RANK')!r} and WORLD_SIZE {os.environ.get('WORLD_SIZE')!r}",
            needed="both as torchrun sets them",
            do="start many processes with torchrun, and one without these variables",
        )
    if size == 1:
        yield ALONE
        return
    both = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if both else "gloo", timeout=HOST_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise TrainingError(
            f"process {rank} of {size} does not reach the others: {first_line(error)}",
            needed="MASTER_ADDR and MASTER_PORT of a run that all join",
            do="start it with torchrun",
        ) from None
    try:
        yield World(rank=rank, size=size)
    finally:
        dist.destroy_process_group()


def _plain(error: DraftcacheError | None) -> dict[str, str] | None:
    return None if error is None else {"found": error.found, "needed": error.needed, "do": error.do}
