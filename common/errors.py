"""Every error a user can meet.

    DraftcacheError
    ├── UsageError        a flag, or a combination of flags, that cannot work
    ├── DataError         a line of the data set that cannot be used
    ├── TargetError       a target folder or model that cannot be used
    ├── StoreError        a store that is missing, unfinished or in the way
    │   ├── MismatchError     made from something else than what is asked for
    │   └── DamageError       bytes that are not what was written
    ├── CheckpointError   a run's checkpoint that is missing or does not fit
    └── TrainingError     training that went wrong and must not go on

Each message says what was found, what was needed and what to do. The command line prints it in one line and exits 2.
`assert` is for our own bugs.
"""


class DraftcacheError(Exception):
    """Base of everything the command line turns into one line and exit code 2."""

    def __init__(self, found: str, *, needed: str, do: str) -> None:
        self.found = found
        self.needed = needed
        self.do = do
        super().__init__(f"{found}; needed: {needed}; do: {do}")


class UsageError(DraftcacheError):
    """A flag, or a combination of flags, that cannot work."""


class DataError(DraftcacheError):
    """A line of the data set that cannot be used; `found` starts with file and line number."""


class TargetError(DraftcacheError):
    """A target folder or model that cannot be used."""


class StoreError(DraftcacheError):
    """A store that is missing, unfinished or in the way."""


class MismatchError(StoreError):
    """A store or run made from something else than what is asked for."""


class DamageError(StoreError):
    """Bytes that are not what was written; names the file and the samples in it."""


class CheckpointError(DraftcacheError):
    """A run's checkpoint that is missing or does not fit."""


class TrainingError(DraftcacheError):
    """Training that went wrong and must not go on."""


def first_line(error: BaseException) -> str:
    """What a foreign error says, cut to one line of at most 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
