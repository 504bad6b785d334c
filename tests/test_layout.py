"""Ceilings, strides and the byte arithmetic of shards, at full scale and at any record width."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftcache.common.errors import UsageError
from draftcache.common.layout import (
    CHUNK_TOKENS,
    DEFAULT_CEILINGS,
    DEFAULT_TOKEN_BUDGET,
    PAGE,
    RECORD_ALIGNMENT,
    ShardGeometry,
    ceiling_for,
    check_ceilings,
    round_up,
    row_stride,
    rows_per_batch,
)
from draftcache.common.memory import aligned_bytes
from draftcache.common.shard import write_shard

FULL_RECORD_BYTES = 61_440
GEOMETRIES = st.builds(
    ShardGeometry,
    rows=st.integers(1, 64),
    ceiling=st.integers(1, 9000),
    record_bytes=st.integers(1, 1000).map(lambda units: units * RECORD_ALIGNMENT),
)


def test_strides_of_the_full_scale_ceilings() -> None:
    strides = {ceiling: row_stride(ceiling) for ceiling in DEFAULT_CEILINGS}
    assert strides == {770: 832, 1216: 1216, 1728: 1728, 2432: 2432, 3296: 3328, 8192: 8192}


def test_rows_per_batch_follow_from_the_stride() -> None:
    rows = {ceiling: rows_per_batch(DEFAULT_TOKEN_BUDGET, ceiling) for ceiling in DEFAULT_CEILINGS}
    assert rows == {770: 59, 1216: 40, 1728: 28, 2432: 20, 3296: 14, 8192: 6}


def test_a_batch_has_a_row_even_beyond_the_budget() -> None:
    assert rows_per_batch(100, 8192) == 1


@pytest.mark.parametrize(("value", "rounded"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_round_up(value: int, rounded: int) -> None:
    assert round_up(value, 64) == rounded


@pytest.mark.parametrize("ceiling", DEFAULT_CEILINGS)
def test_a_length_equal_to_a_ceiling_stays_in_it(ceiling: int) -> None:
    assert ceiling_for(ceiling, DEFAULT_CEILINGS) == ceiling
    assert ceiling_for(ceiling - 1, DEFAULT_CEILINGS) == ceiling


def test_one_token_more_goes_to_the_next_ceiling() -> None:
    for ceiling, following in pairwise(DEFAULT_CEILINGS):
        assert ceiling_for(ceiling + 1, DEFAULT_CEILINGS) == following
    assert ceiling_for(DEFAULT_CEILINGS[-1] + 1, DEFAULT_CEILINGS) is None
    assert ceiling_for(1, DEFAULT_CEILINGS) == DEFAULT_CEILINGS[0]


@pytest.mark.parametrize("ceilings", [(), (1,), (0, 64), (-64, 64), (64, 64), (128, 64), (64, 128, 127)])
def test_ceilings_out_of_order_are_refused(ceilings: tuple[int, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        check_ceilings(ceilings)
    assert str(list(ceilings)) in caught.value.found


@pytest.mark.parametrize("ceilings", [(2,), (64, 65), DEFAULT_CEILINGS])
def test_ascending_ceilings_are_accepted(ceilings: tuple[int, ...]) -> None:
    check_ceilings(ceilings)


@given(GEOMETRIES)
def test_chunks_are_whole_pages_at_any_record_width(geometry: ShardGeometry) -> None:
    assert geometry.chunk_bytes % PAGE == 0
    assert geometry.chunk_bytes == CHUNK_TOKENS * geometry.record_bytes
    assert geometry.chunk_span == geometry.chunk_bytes + PAGE


@given(GEOMETRIES)
def test_a_row_is_its_ceiling_in_whole_chunks(geometry: ShardGeometry) -> None:
    assert 0 <= geometry.stride - geometry.ceiling < CHUNK_TOKENS
    assert geometry.stride == geometry.chunks_per_row * CHUNK_TOKENS
    assert geometry.row_bytes == geometry.stride * geometry.record_bytes
    assert geometry.index_bytes == geometry.rows * geometry.chunks_per_row * 16 + 4


@pytest.mark.parametrize(("length", "live"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (770, 13)])
def test_live_chunks_hold_at_least_one_real_token(length: int, live: int) -> None:
    assert ShardGeometry(rows=1, ceiling=770, record_bytes=64).live_chunks(length) == live


def test_geometry_of_a_full_scale_shard() -> None:
    geometry = ShardGeometry(rows=59, ceiling=770, record_bytes=FULL_RECORD_BYTES)
    assert (geometry.stride, geometry.chunks_per_row) == (832, 13)
    assert (geometry.chunk_bytes, geometry.chunk_span) == (3_932_160, 3_936_256)
    assert geometry.row_bytes == 51_118_080
    assert geometry.index_bytes == 59 * 13 * 16 + 4
    assert geometry.file_bytes([770, 64, 1]) == (13 + 1 + 1) * 3_936_256 + 3 * PAGE  # the index: 12,276 bytes


@pytest.mark.parametrize("lengths", [[130], [1, 130, 64], [65, 64], [128, 129, 2, 1]])
def test_file_bytes_are_the_bytes_written(tmp_path: Path, lengths: list[int]) -> None:
    geometry = ShardGeometry(rows=4, ceiling=130, record_bytes=128)
    records = aligned_bytes(len(lengths) * geometry.row_bytes).reshape(len(lengths), geometry.stride, -1)
    write_shard(tmp_path / "shard", geometry, records, lengths)
    assert geometry.file_bytes(lengths) == (tmp_path / "shard").stat().st_size


@pytest.mark.parametrize(("below", "ceiling"), list(pairwise((0, *DEFAULT_CEILINGS))))
def test_a_full_scale_bucket_stores_at_most_a_tenth_more_than_its_real_tokens(below: int, ceiling: int) -> None:
    lengths = list(range(below + 1, ceiling + 1))  # uniform: every length once
    random.Random(0).shuffle(lengths)
    rows = rows_per_batch(DEFAULT_TOKEN_BUDGET, ceiling)
    geometry = ShardGeometry(rows=rows, ceiling=ceiling, record_bytes=FULL_RECORD_BYTES)
    stored = sum(geometry.file_bytes(lengths[first : first + rows]) for first in range(0, len(lengths), rows))
    real = sum(lengths) * FULL_RECORD_BYTES
    assert 1.0 < stored / real <= 1.10
