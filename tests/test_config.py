"""Configurations to JSON and back, strictly, and the fingerprint that tells two of them apart."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from draftcache.common.config import differences, fingerprint, from_dict, to_dict
from draftcache.common.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A nested configuration."""

    name: str
    rate: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """One field of every kind that the project's configurations use."""

    count: int
    flag: bool
    inner: Inner
    maybe: int | None
    layers: tuple[int, ...]
    parts: tuple[Inner, ...] = ()
    nested: Inner | None = None
    limits: tuple[int, ...] | None = None
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


OUTER = Outer(
    count=3,
    flag=True,
    inner=Inner(name="a", rate=1e-6),
    maybe=None,
    layers=(1, 9),
    parts=(Inner(name="b"), Inner(name="c", rate=2.0)),
    nested=Inner(name="é"),
    limits=(7,),
    counts={"x": 1},
)


def rebuild(**changes: object) -> Outer:
    """OUTER's dictionary with some values changed, read back."""
    return from_dict(Outer, to_dict(OUTER) | changes, "file.json")


def refusal(**changes: object) -> str:
    """What `rebuild` refuses, as its message."""
    with pytest.raises(UsageError) as caught:
        rebuild(**changes)
    return str(caught.value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A configuration that names files."""

    folder: Path
    other: Path | None = None


def test_paths_are_written_as_text_and_read_back() -> None:
    place = Place(folder=Path("/a/b"))
    plain = to_dict(place)
    assert plain == {"folder": "/a/b", "other": None}
    assert from_dict(Place, plain, "here") == place
    with pytest.raises(UsageError, match="folder"):
        from_dict(Place, {"folder": 3}, "here")


def test_round_trip_through_json() -> None:
    assert from_dict(Outer, json.loads(json.dumps(to_dict(OUTER))), "here") == OUTER


def test_to_dict_holds_json_values_only() -> None:
    plain = to_dict(OUTER)
    assert plain == json.loads(json.dumps(plain))
    assert plain["layers"] == [1, 9]
    assert plain["parts"] == [{"name": "b", "rate": 0.5}, {"name": "c", "rate": 2.0}]
    assert plain["maybe"] is None


def test_tuples_and_nested_classes_are_rebuilt() -> None:
    found = from_dict(Outer, to_dict(OUTER), "here")
    assert isinstance(found.layers, tuple)
    assert isinstance(found.limits, tuple)
    assert isinstance(found.parts[1], Inner)
    assert isinstance(found.nested, Inner)


def test_defaults_stand_in_for_absent_keys() -> None:
    plain = to_dict(OUTER)
    for name in ("parts", "nested", "limits", "counts"):
        del plain[name]
    found = from_dict(Outer, plain, "here")
    assert (found.parts, found.nested, found.limits, found.counts) == ((), None, None, {})


def test_a_whole_number_is_a_float_where_one_is_wanted() -> None:
    found = rebuild(inner={"name": "a", "rate": 2})
    assert found.inner.rate == 2.0
    assert isinstance(found.inner.rate, float)


def test_nothing_is_told_from_zero_and_empty() -> None:
    found = rebuild(maybe=0, limits=[], nested=None)
    assert (found.maybe, found.limits, found.nested) == (0, (), None)


def test_unknown_keys_are_refused() -> None:
    assert "unknown keys ['colour']" in refusal(colour=1)
    assert "file.json: inner has unknown keys ['colour']" in refusal(inner={"name": "a", "colour": 1})


def test_missing_keys_are_refused() -> None:
    plain = to_dict(OUTER)
    del plain["count"], plain["layers"]
    with pytest.raises(UsageError) as caught:
        from_dict(Outer, plain, "file.json")
    assert "lacks ['count', 'layers']" in caught.value.found
    assert "file.json: parts has unknown keys [] and lacks ['name']" in refusal(parts=[{"rate": 1.0}])


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("count", "3", "int"),
        ("count", 3.0, "int"),
        ("count", True, "int"),
        ("count", None, "int"),
        ("flag", 1, "bool"),
        ("flag", None, "bool"),
        ("inner", {"name": 5}, "str"),
        ("inner", {"name": "a", "rate": "1"}, "float"),
        ("inner", {"name": "a", "rate": None}, "float"),
        ("maybe", "1", "int"),
        ("layers", ["1"], "int"),
        ("layers", [None], "int"),
        ("limits", [1.5], "int"),
        ("parts", [{"name": None}], "str"),
        ("nested", {"name": []}, "str"),
    ],
)
def test_values_of_a_wrong_type_are_refused(key: str, value: object, wanted: str) -> None:
    message = refusal(**{key: value})
    assert message.startswith(f"file.json: {key}")
    assert f"a value of type {wanted};" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers", 5),
        ("layers", None),
        ("layers", {}),
        ("layers", ""),
        ("inner", None),
        ("inner", 3),
        ("parts", [3]),
        ("counts", [1]),
        ("counts", None),
        ("counts", {"x": "y"}),
        ("inner", {"name": "a", "rate": True}),
    ],
)
def test_values_of_a_wrong_structure_are_refused(key: str, value: object) -> None:
    assert f"file.json: {key}" in refusal(**{key: value})


def test_fingerprint_is_stable() -> None:
    assert fingerprint(OUTER) == fingerprint(from_dict(Outer, to_dict(OUTER), "here")) == fingerprint(to_dict(OUTER))
    assert fingerprint(Inner(name="a")) == hashlib.sha256(b'{"name":"a","rate":0.5}').hexdigest()


def test_fingerprint_does_not_depend_on_the_order_of_keys() -> None:
    assert fingerprint({"a": 1, "b": [2, 3]}) == fingerprint({"b": [2, 3], "a": 1})
    assert fingerprint({"b": [2, 3]}) != fingerprint({"b": [3, 2]})


CHANGES: dict[str, Any] = {
    "count": 4,
    "flag": False,
    "inner": Inner(name="a", rate=2e-6),
    "maybe": 0,
    "layers": (9, 1),
    "parts": (Inner(name="b"),),
    "nested": None,
    "limits": (),
    "counts": {"x": 2},
}


def test_every_field_has_a_change() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Outer)}


@pytest.mark.parametrize("name", CHANGES)
def test_fingerprint_and_differences_see_every_field(name: str) -> None:
    changed = dataclasses.replace(OUTER, **{name: CHANGES[name]})
    assert fingerprint(changed) != fingerprint(OUTER)
    (line,) = differences(to_dict(changed), to_dict(OUTER))
    assert line.startswith(name)


def test_differences_name_the_path_and_both_values() -> None:
    found = to_dict(dataclasses.replace(OUTER, count=4, inner=Inner(name="z", rate=1e-6)))
    assert differences(found, to_dict(OUTER)) == [
        "count: found 4, wanted 3",
        'inner.name: found "z", wanted "a"',
    ]


def test_equal_values_have_no_differences() -> None:
    assert differences(to_dict(OUTER), to_dict(OUTER)) == []


def test_a_key_that_only_one_side_has_is_a_difference() -> None:
    assert differences({"a": {"b": 1}}, {"a": {}}) == ["a.b: found 1, wanted null"]
    assert differences({}, {"a": {"b": 1}}) == ['a: found null, wanted {"b": 1}']


def test_long_values_are_cut_in_differences() -> None:
    (line,) = differences({"ids": list(range(100))}, {"ids": []})
    assert line.endswith("..., wanted []")
    assert len(line) < 100
