"""Writes checkpoints behind the loop: a snapshot into host memory allocated once, then a thread brings it to disk.

On CUDA the snapshot is copied by a stream of its own while the next step's micro-batches run: they only read the
weights. The next update, which writes them, waits for the copy. The host waits for nothing but an unfinished write of
the checkpoint before.
"""

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from draftcache.common.errors import TrainingError
from draftcache.common.layout import round_up
from draftcache.common.memory import aligned_bytes
from draftcache.common.pinned import pin, unpin
from draftcache.train.checkpoint import Progress, checkpoint_path, prune, write_checkpoint

_ALIGNMENT = 64


class Saver:
    """The host copies of a run's tensors and the thread that writes them. Use as a context manager."""

    def __init__(self, folder: Path | None, files: Mapping[str, dict[str, Tensor]], keep: int) -> None:
        """`files` holds the tensors by file and name; they keep their addresses. `folder` None: nothing is written."""
        self._folder, self._keep = folder, keep
        self._device = next(iter(next(iter(files.values())).values())).device
        self._sources = [tensor for tensors in files.values() for tensor in tensors.values()]
        self._memory = torch.zeros(0, dtype=torch.uint8)
        self._files: dict[str, dict[str, Tensor]] = {}
        if folder is not None:
            self._memory, self._files = _host_twins(files)
        self._finite = torch.ones(1, dtype=torch.bool)
        self._on_cuda = self._device.type == "cuda"
        if self._on_cuda and folder is not None:
            pin(self._memory)
            self._finite = self._finite.pin_memory()
            self._stream = torch.cuda.Stream(self._device)
        self._copied: torch.cuda.Event | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def save(self, progress: Progress) -> None:
        """Begin the checkpoint of the tensors as they are now. Raises what the one before it met."""
        if self._folder is None:
            return
        self.wait()
        finite = _all_finite(self._sources)
        twins = [twin for tensors in self._files.values() for twin in tensors.values()]
        if self._on_cuda:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._copy(twins, finite)
                self._copied = torch.cuda.Event(blocking=True)
                self._copied.record()
            finite.record_stream(self._stream)
        else:
            self._copy(twins, finite)
        self._pending = self._writer.submit(self._write, self._folder, progress, self._copied)

    def before_update(self) -> None:
        """Make the device wait with what comes now until the snapshot is taken."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def wait(self) -> None:
        """Until the last checkpoint is on disk. Raises what its writing met."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._writer.shutdown(wait=True)
        if self._on_cuda and self._folder is not None:
            torch.cuda.synchronize(self._device)
            unpin(self._memory)
        if error is None:
            self.wait()

    def _copy(self, twins: list[Tensor], finite: Tensor) -> None:
        for twin, source in zip(twins, self._sources, strict=True):
            twin.copy_(source.detach(), non_blocking=True)
        self._finite.copy_(finite[None], non_blocking=True)

    def _write(self, folder: Path, progress: Progress, copied: "torch.cuda.Event | None") -> Path:
        if copied is not None:
            copied.synchronize()
        if not self._finite:
            raise TrainingError(
                f"weights or moments are not finite after step {progress.step}; no checkpoint was written of them",
                needed="finite numbers",
                do="lower --lr and go on from the last checkpoint with --resume",
            )
        write_checkpoint(folder, progress, self._files)
        prune(folder, self._keep)
        return checkpoint_path(folder, progress.step)


def _all_finite(tensors: list[Tensor]) -> Tensor:
    """[] bool, on the device, by the largest magnitudes: no other memory than theirs."""
    largest = [torch.linalg.vector_norm(t.detach(), math.inf).float() for t in tensors if t.is_floating_point()]
    return torch.stack(largest).isfinite().all()


def _host_twins(files: Mapping[str, dict[str, Tensor]]) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """Page-aligned memory and, in it, a tensor like every given one."""
    spans = {(f, n): round_up(t.nbytes, _ALIGNMENT) for f, tensors in files.items() for n, t in tensors.items()}
    memory = torch.from_numpy(aligned_bytes(sum(spans.values())))
    twins: dict[str, dict[str, Tensor]] = {name: {} for name in files}
    offset = 0
    for (file, name), span in spans.items():
        like = files[file][name]
        twins[file][name] = memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
        offset += span
    return memory, twins
