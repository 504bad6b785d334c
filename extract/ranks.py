"""The processes of one extraction as torchrun started them: one a GPU, or one alone.

They share nothing but the store's folder, the list of batches to do, and two meetings (gloo): when the store is there,
and when all is written.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from draftcache.common.errors import StoreError, UsageError, first_line

_PATIENCE = timedelta(days=2)
"""Ranks wait as long as the others tokenize or write; torchrun ends them all if one fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's number and how many there are."""

    rank: int
    size: int

    def device_name(self, name: str) -> str:
        """The device of this rank: with several of them, `cuda` means one GPU each."""
        alone = self.size == 1 or name != "cuda"
        return name if alone else f"cuda:{os.environ.get('LOCAL_RANK', self.rank)}"

    def from_first(self, numbers: Sequence[int]) -> list[int]:
        """What rank 0 passes here, in every rank; the others' argument is not looked at. Waits for rank 0."""
        if self.size == 1:
            return list(numbers)
        with _peers_may_be_gone():
            count = torch.tensor([len(numbers)])
            dist.broadcast(count, 0)
            values = torch.tensor(numbers) if self.rank == 0 else torch.empty(int(count), dtype=torch.int64)
            if len(values):
                dist.broadcast(values, 0)
        found: list[int] = values.tolist()
        return found

    def meet(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            with _peers_may_be_gone():
                dist.barrier()


def world_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return _from_environment("WORLD_SIZE", 1)


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks that RANK and WORLD_SIZE name, connected; one alone where they are not set."""
    rank, size = _from_environment("RANK", 0), world_size()
    if size == 1:
        yield Ranks(rank=0, size=1)
        return
    try:
        dist.init_process_group("gloo", timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"WORLD_SIZE is {size}, but the ranks do not connect: {first_line(error)}",
            needed="every rank running",
            do="start with torchrun",
        ) from None
    try:
        yield Ranks(rank=rank, size=size)
    finally:
        dist.destroy_process_group()


@contextmanager
def _peers_may_be_gone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StoreError(
            f"another rank has stopped ({first_line(error)})", needed="all ranks", do="see its message, then --resume"
        ) from None


def _from_environment(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError as error:
        raise UsageError(f"{name}: {error}", needed="a number", do="start with torchrun") from None
