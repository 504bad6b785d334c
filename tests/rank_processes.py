"""Starts the ranks of an extraction as torchrun does, from a server that has imported everything already."""

import multiprocessing
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from draftcache.cli import main
from draftcache.tests.stores import CEILINGS, LAYER_IDS, TOKEN_BUDGET

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["draftcache.extract.run"])


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended."""

    code: int | None
    out: str
    err: str


class Rank:
    """One running rank of `draftcache extract`."""

    def __init__(self, arguments: list[str], environment: dict[str, str], logs: Path) -> None:
        logs.mkdir(parents=True)
        self._out, self._err = logs / "out", logs / "err"
        self._process = _SERVER.Process(target=_run, args=(arguments, environment, str(self._out), str(self._err)))
        self._process.start()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()

    def wait(self) -> Ended:
        """What it said, once it has ended."""
        self._process.join(timeout=120)
        return Ended(self._process.exitcode, self._out.read_text(), self._err.read_text())


def start_ranks(size: int, target: Path, data: Path, store: Path, logs: Path, *flags: str) -> list[Rank]:
    """Ranks of one extraction with the small ceilings and token budget."""
    arguments = ["extract", "--target", str(target), "--data", str(data), "--store", str(store), "--device", "cpu"]
    arguments += ["--layers", ",".join(map(str, LAYER_IDS)), "--buckets", ",".join(map(str, CEILINGS))]
    arguments += ["--token-budget", str(TOKEN_BUDGET), *flags]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [Rank(arguments, common | {"RANK": str(r), "LOCAL_RANK": str(r)}, logs / str(r)) for r in range(size)]


def _run(arguments: list[str], environment: dict[str, str], out: str, err: str) -> None:
    os.environ.update(environment)
    sys.argv = ["draftcache", *arguments]
    sys.stdout, sys.stderr = Path(out).open("w"), Path(err).open("w")  # noqa: SIM115 - closed as the process ends
    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
