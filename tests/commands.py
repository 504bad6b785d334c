"""Runs the command line in this process, as a test would type it."""

import sys
from dataclasses import dataclass

import pytest

from draftcache.cli import main


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit code and what was printed."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The last line on stderr: the error's one line."""
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""


def run(capsys: pytest.CaptureFixture[str], *args: object) -> Outcome:
    """Run `draftcache ARGS`."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["draftcache", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            main()
    printed = capsys.readouterr()
    return Outcome(int(stopped.value.code or 0), printed.out, printed.err)
