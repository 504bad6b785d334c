"""Frozen dataclasses to plain dictionaries and back, strictly, and their fingerprint.

A configuration is a frozen, slotted, keyword-only dataclass beside the component that reads it. This file knows only
how such a class is written to JSON and read back: unknown or missing keys are errors, nested classes and tuples are
rebuilt, and nothing is guessed.
"""

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from draftcache.common.errors import UsageError

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass instance as a dictionary of JSON values (tuples become lists, paths become strings)."""
    plain = json.loads(json.dumps(dataclasses.asdict(config), default=_path_text))
    assert isinstance(plain, dict)
    return plain


def from_dict(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Rebuild `cls` from `values`.

    `where` names the source in errors, such as a file. Raises UsageError for missing and unknown keys, or none at all.
    """
    assert dataclasses.is_dataclass(cls), f"{cls} is not a dataclass"
    _checked(values, dict, where)
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    required = {f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING}
    unknown, missing = sorted(set(values) - known), sorted(required - set(values))
    if unknown or missing:
        raise UsageError(
            f"{where} has unknown keys {unknown} and lacks {missing}",
            needed=f"the keys of {cls.__name__}: {sorted(known)}",
            do="use a file written by this version",
        )
    return cls(**{key: _rebuild(hints[key], value, f"{where}: {key}") for key, value in values.items()})


def fingerprint(config: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of a dataclass instance or JSON value."""
    plain = to_dict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else config
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(found: Any, wanted: Any, prefix: str = "") -> list[str]:
    """Every leaf in which two JSON values differ, as 'path: found A, wanted B'."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return [
            line
            for key in sorted(set(found) | set(wanted))
            for line in differences(found.get(key), wanted.get(key), f"{prefix}.{key}" if prefix else key)
        ]
    return [] if found == wanted else [f"{prefix}: found {_short(found)}, wanted {_short(wanted)}"]


def _path_text(value: Any) -> str:
    assert isinstance(value, Path), f"{value!r} has no place in a configuration"
    return str(value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _rebuild(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (a for a in args if a is not type(None))
        return _rebuild(hint, value, where)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return from_dict(hint, _checked(value, dict, where), where)
    if origin is tuple:
        return tuple(_rebuild(args[0], item, where) for item in _checked(value, list, where))
    if origin is dict:
        return {key: _rebuild(args[1], item, where) for key, item in _checked(value, dict, where).items()}
    if hint is Path:
        return Path(_checked(value, str, where))
    if hint is float and type(value) is int:
        return float(value)
    return _checked(value, hint, where)


def _checked(value: Any, kind: type, where: str) -> Any:
    """`value` if its JSON type is exactly `kind`: a bool is no int."""
    if type(value) is not kind:
        raise UsageError(
            f"{where} is {value!r}", needed=f"a value of type {kind.__name__}", do="use a file written by this version"
        )
    return value
