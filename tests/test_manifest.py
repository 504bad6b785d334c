"""The manifest: it survives, no damage to it goes unnoticed, and a stranger is refused by every difference."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftcache.common.config import fingerprint, to_dict
from draftcache.common.errors import DamageError, MismatchError, StoreError
from draftcache.common.layout import LAYOUT_VERSION
from draftcache.common.manifest import check_same, read_manifest
from draftcache.common.store import Store, open_store


@pytest.fixture
def folder(copied: Store) -> Path:
    """A store's folder that may be damaged."""
    return copied.path


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest's JSON in place, its checksum with it."""
    values = json.loads((path / "manifest.json").read_text())
    del values["checksum"]
    change(values)
    (path / "manifest.json").write_text(json.dumps(values | {"checksum": fingerprint(values)}))


def refusal(path: Path) -> StoreError:
    """The error with which opening a store is refused."""
    with pytest.raises(StoreError) as caught:
        open_store(path)
    assert str(path) in caught.value.found
    return caught.value


def test_the_manifest_survives(store: Store) -> None:
    assert read_manifest(store.path) == store.manifest
    values = json.loads((store.path / "manifest.json").read_text())
    checksum = values.pop("checksum")
    assert values == to_dict(store.manifest)
    assert checksum == fingerprint(values)


def test_a_changed_digit_in_the_manifest_is_damage(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    digits = [at for at, letter in enumerate(text) if letter.isdigit()]
    for at in random.Random(0).sample(digits, 30):
        if "layout_version" not in text[text.rfind("\n", 0, at) : at]:
            (folder / "manifest.json").write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
            with pytest.raises(DamageError) as caught:
                read_manifest(folder)
            assert "fails its checksum" in caught.value.found


def test_a_manifest_without_its_checksum_is_damage(folder: Path) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    del values["checksum"]
    (folder / "manifest.json").write_text(json.dumps(values))
    assert isinstance(refusal(folder), DamageError)


def test_the_order_of_keys_in_the_manifest_does_not_matter(folder: Path, store: Store) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(dict(reversed(values.items()))))
    assert read_manifest(folder) == store.manifest


@pytest.mark.parametrize("name", ["", "missing"])
def test_a_folder_without_a_manifest_is_no_store(tmp_path: Path, name: str) -> None:
    assert "has no manifest.json" in refusal(tmp_path / name).found


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("mine")
    refusal(tmp_path / "store")


@pytest.mark.parametrize("raw", [b"", b"{", b"nonsense", b"\xff\xfe\x00", b'{"layout_version": 1'])
def test_a_garbled_manifest_is_refused(folder: Path, raw: bytes) -> None:
    (folder / "manifest.json").write_bytes(raw)
    assert "is not JSON" in refusal(folder).found


@pytest.mark.parametrize("raw", ["null", "[]", "3", "{}", '{"layout_version": null}', '{"layout_version": 99}'])
def test_another_layout_version_is_refused(folder: Path, raw: str) -> None:
    (folder / "manifest.json").write_text(raw)
    error = refusal(folder)
    assert "has layout version" in error.found
    assert error.needed == f"version {LAYOUT_VERSION}"


def test_a_later_layout_version_is_refused_before_its_keys(folder: Path) -> None:
    rewrite(folder, lambda values: values.update(layout_version=LAYOUT_VERSION + 1, news=True))
    assert f"has layout version {LAYOUT_VERSION + 1}" in refusal(folder).found


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda values: values.pop("target"), "lacks ['target']"),
        (lambda values: values["settings"].pop("layer_ids"), "lacks ['layer_ids']"),
        (lambda values: values.update(colour="red"), "unknown keys ['colour']"),
        (lambda values: values["target"].update(hidden_size="32"), "hidden_size is '32'"),
        (lambda values: values["buckets"][0].update(rows=1.5), "rows is 1.5"),
        (lambda values: values["target"].update(tied_head=0), "tied_head is 0"),
    ],
)
def test_a_manifest_with_wrong_keys_or_types_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], word: str
) -> None:
    rewrite(folder, change)
    assert word in refusal(folder).found


def test_the_same_manifest_is_the_same(store: Store) -> None:
    renamed = dataclasses.replace(store.manifest.target, name="other")  # its folder moved
    other = dataclasses.replace(store.manifest, draftcache_version="other", target=renamed, files=())
    check_same(store.manifest, other, "the store")


def test_a_stranger_is_refused_by_every_difference(store: Store) -> None:
    other = dataclasses.replace(
        store.manifest,
        target=dataclasses.replace(store.manifest.target, weights_digest="abc"),
        settings=dataclasses.replace(store.manifest.settings, layer_ids=(0, 2)),
    )
    with pytest.raises(MismatchError) as caught:
        check_same(store.manifest, other, "the store")
    assert "settings.layer_ids: found [1, 3, 5], wanted [0, 2]" in caught.value.found
    assert "target.weights_digest" in caught.value.found
    assert caught.value.found.startswith("the store was made from something else")


def test_a_manifests_identity_leaves_out_the_version_that_wrote_it(store: Store) -> None:
    manifest = store.manifest
    assert dataclasses.replace(manifest, draftcache_version="other").identity == manifest.identity
    assert dataclasses.replace(manifest, final_norm_applied=False).identity != manifest.identity
