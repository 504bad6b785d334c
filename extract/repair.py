"""Puts back what a store holds besides its shards: a damaged file is made again, and must be what it was before."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from draftcache.common.errors import DamageError
from draftcache.common.files import PARTIAL_SUFFIX, atomic_path
from draftcache.common.manifest import digest_file
from draftcache.common.store import Store, create_store
from draftcache.common.target import PARTS_PATH, Target, save_parts
from draftcache.common.verify import file_damage
from draftcache.extract.plan import Plan


def repair_files(store: Store, plan: Plan, source: Path, load: Callable[[], Target]) -> int:
    """Write every damaged or missing file of the manifest again; returns how many there were.

    `load` is called only if parts of the target, whose folder is `source`, are among them. Raises DamageError if a file
    cannot be made as it was, for example by another version of zarr-python.
    """
    manifest = store.manifest
    damaged = [file for file in manifest.files if file_damage(store, file.name)]
    if not damaged:
        return 0
    with TemporaryDirectory(dir=store.path, suffix=PARTIAL_SUFFIX) as folder:
        fresh = Path(folder)
        create_store(fresh, manifest.record, {s.ceiling: s.rows for s in manifest.buckets}, plan.buckets)
        if any(Path(file.name).parent == Path(PARTS_PATH).parent for file in damaged):
            save_parts(load(), source, fresh, plan.chat_template)
        for file in damaged:
            made, path = fresh / file.name, store.path / file.name
            if not made.is_file() or digest_file(made) != file.digest:
                raise DamageError(
                    f"{path} is damaged, and comes out otherwise when it is made again",
                    needed="the file that extraction wrote",
                    do="restore it, use the versions of draftcache and its packages that wrote it, or pass --overwrite",
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as partial:
                made.replace(partial)
    return len(damaged)
