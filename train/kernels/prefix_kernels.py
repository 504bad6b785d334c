"""The Triton kernels of `prefix_attention.py`. Import it only where there is a CUDA device.

One program holds HEADS query heads of one key head (a group) for as many consecutive blocks as make a tile of rows
worth a tensor core's while (a bundle): their ranges of context keys nearly agree, so keys are read once for all those
rows. Tiles that every row sees whole need no mask. Sums are float32, and there are no atomics: equal inputs give equal
bits.

Legend: T context tokens, B block size, SPAN slots of a bundle, ROWS = SPAN * HEADS rows of a program, padded to a power
of two, D head width, M key heads, groups g = 0 .. M * PARTS - 1, of which PARTS serve one key head.
"""

import triton
import triton.language as tl


@triton.jit
def _rows_at(
    row_stride,
    head_stride,
    bundle,
    group,
    slots,
    SPAN: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    """Where a bundle's rows of a group's heads lie, [ROWS, D], and which of them exist, [ROWS, 1]."""
    row = tl.arange(0, ROWS)
    slot, head = bundle * SPAN + row % SPAN, group * HEADS + row // SPAN
    at = slot.to(tl.int64)[:, None] * row_stride + head[:, None] * head_stride + tl.arange(0, D)[None, :]
    return at, ((row < HEADS * SPAN) & (slot < slots))[:, None]


@triton.jit
def _load_rows(
    ptr,
    row_stride,
    head_stride,
    bundle,
    group,
    slots,
    SPAN: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    at, there = _rows_at(row_stride, head_stride, bundle, group, slots, SPAN, HEADS, ROWS, D)
    return tl.load(ptr + at, mask=there, other=0.0)


@triton.jit
def _statistics_at(bundle, group, slots, SPAN: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Where a number for each row lies, head after head, and which rows exist, [ROWS] each."""
    row = tl.arange(0, ROWS)
    slot = bundle * SPAN + row % SPAN
    return (group * HEADS + row // SPAN).to(tl.int64) * slots + slot, (row < HEADS * SPAN) & (slot < slots)


@triton.jit
def _keys_at(key, row_stride, head_stride, head, D: tl.constexpr):
    """Where keys (or values) lie, [keys, D]."""
    return key.to(tl.int64)[:, None] * row_stride + head * head_stride + tl.arange(0, D)[None, :]


@triton.jit
def _own_at(row_stride, head_stride, bundle, head, slots, SPAN: tl.constexpr, OWN: tl.constexpr, D: tl.constexpr):
    """Where the keys (or values) of a bundle's own slots lie, [OWN, D], and which of them exist, [OWN, 1]."""
    own = tl.arange(0, OWN)
    slot = bundle * SPAN + own
    return _keys_at(slot, row_stride, head_stride, head, D), ((own < SPAN) & (slot < slots))[:, None]


@triton.jit
def _load_own(
    ptr, row_stride, head_stride, bundle, head, slots, SPAN: tl.constexpr, OWN: tl.constexpr, D: tl.constexpr
):
    at, there = _own_at(row_stride, head_stride, bundle, head, slots, SPAN, OWN, D)
    return tl.load(ptr + at, mask=there, other=0.0)


@triton.jit
def _store_own(
    ptr, row_stride, head_stride, values, bundle, head, slots, SPAN: tl.constexpr, OWN: tl.constexpr, D: tl.constexpr
):
    at, there = _own_at(row_stride, head_stride, bundle, head, slots, SPAN, OWN, D)
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=there)


@triton.jit
def _seen(
    first_ptr,
    high_ptr,
    bundle,
    slots,
    B: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The first context key that each row sees, and the first behind them, [ROWS] each."""
    slot = bundle * SPAN + tl.arange(0, ROWS) % SPAN
    block = tl.minimum(slot, slots - 1) // B
    low, high = tl.load(first_ptr + block), tl.load(high_ptr + block)
    if WINDOW > 0:
        low = tl.maximum(low, high + slot % B - (WINDOW - 1))
    return low, high


@triton.jit
def _context_tiles(low, high, KEYS: tl.constexpr):
    """First key of all tiles, of the whole ones (those that every row sees whole), behind those and behind all."""
    end = tl.max(high, axis=0)
    begin = tl.min(tl.where(high > 0, low, end), axis=0) // KEYS * KEYS
    whole_end = tl.maximum(begin, tl.min(high, axis=0) // KEYS * KEYS)
    whole_begin = tl.minimum(tl.maximum(begin, tl.cdiv(tl.max(low, axis=0), KEYS) * KEYS), whole_end)
    return begin, whole_begin, whole_end, end


@triton.jit
def _edge_tile(number, begin, whole_begin, whole_end, KEYS: tl.constexpr):
    """First key of the tiles before and behind the whole ones, in one count."""
    start = begin + number * KEYS
    return tl.where(start < whole_begin, start, whole_end + start - whole_begin)


@triton.jit
def _bundles_that_see(counts_ptr, tile, BLOCKS: tl.constexpr, KEYS: tl.constexpr, GRAIN: tl.constexpr):
    """First bundle that sees a key of the tile, one past the last; likewise of the bundles that see all of it."""
    borders: tl.constexpr = KEYS // GRAIN
    stride = tl.num_programs(0) * borders + 1
    left, right = counts_ptr + tile * borders, counts_ptr + (tile + 1) * borders
    begin, whole_end = tl.load(left) // BLOCKS, tl.load(left + stride) // BLOCKS
    end, whole_begin = tl.cdiv(tl.load(right + 2 * stride), BLOCKS), tl.cdiv(tl.load(right + 3 * stride), BLOCKS)
    return begin, end, whole_begin, tl.maximum(whole_begin, whole_end)


@triton.jit
def _own_seen(B: tl.constexpr, SPAN: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr):
    """Which keys of its bundle each row sees, [ROWS, OWN]: those of its block."""
    own, slot = tl.arange(0, OWN), tl.arange(0, ROWS) % SPAN
    sees = (own // B)[None, :] == (slot // B)[:, None]
    if CAUSAL:
        sees = sees & (own[None, :] <= slot[:, None])
    return sees


@triton.jit
def _attend(s, v, mixed, total, largest):
    """The running softmax after one more tile of scores [ROWS, KEYS], in powers of two."""
    new = tl.maximum(largest, tl.max(s, axis=1))
    rescale = tl.exp2(largest - new)
    p = tl.exp2(s - new[:, None])
    mixed = tl.dot(p.to(v.dtype), v, mixed * rescale[:, None])
    return mixed, total * rescale + tl.sum(p, axis=1), new


@triton.jit
def forward_kernel(
    q_ptr, q_row, q_head, ck_ptr, ck_row, ck_head, cv_ptr, cv_row, cv_head, k_ptr, k_row, k_head, v_ptr, v_row, v_head,
    out_ptr, out_row, out_head, lse_ptr, first_ptr, high_ptr, slots, scale,
    B: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, LOG2_E: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """out [slots, N, D] and lse [N, slots], of the scores in powers of two, of one bundle and group."""
    SPAN: tl.constexpr = B * BLOCKS
    bundle, group = tl.program_id(0), tl.program_id(1)
    key_head = group // PARTS
    factor = scale * LOG2_E
    q = _load_rows(q_ptr, q_row, q_head, bundle, group, slots, SPAN, HEADS, ROWS, D)
    # the block itself comes first: every row sees a key of it, so the running maximum is finite from here on
    own_k = _load_own(k_ptr, k_row, k_head, bundle, key_head, slots, SPAN, OWN, D)
    own_v = _load_own(v_ptr, v_row, v_head, bundle, key_head, slots, SPAN, OWN, D)
    own_s = tl.where(_own_seen(B, SPAN, CAUSAL, ROWS, OWN), tl.dot(q, tl.trans(own_k)) * factor, float("-inf"))
    largest = tl.max(own_s, axis=1)
    own_p = tl.exp2(own_s - largest[:, None])
    total = tl.sum(own_p, axis=1)
    mixed = tl.dot(own_p.to(own_v.dtype), own_v)
    low, high = _seen(first_ptr, high_ptr, bundle, slots, B, SPAN, WINDOW, ROWS)
    begin, whole_begin, whole_end, end = _context_tiles(low, high, KEYS)
    for start in range(whole_begin, whole_end, KEYS):
        key = start + tl.arange(0, KEYS)
        k = tl.load(ck_ptr + _keys_at(key, ck_row, ck_head, key_head, D))
        v = tl.load(cv_ptr + _keys_at(key, cv_row, cv_head, key_head, D))
        s = tl.dot(q, tl.trans(k)) * factor
        mixed, total, largest = _attend(s, v, mixed, total, largest)
    for number in range(0, tl.cdiv(whole_begin - begin + end - whole_end, KEYS)):
        key = _edge_tile(number, begin, whole_begin, whole_end, KEYS) + tl.arange(0, KEYS)
        k = tl.load(ck_ptr + _keys_at(key, ck_row, ck_head, key_head, D))
        v = tl.load(cv_ptr + _keys_at(key, cv_row, cv_head, key_head, D))
        sees = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        s = tl.where(sees, tl.dot(q, tl.trans(k)) * factor, float("-inf"))
        mixed, total, largest = _attend(s, v, mixed, total, largest)
    at, there = _rows_at(out_row, out_head, bundle, group, slots, SPAN, HEADS, ROWS, D)
    tl.store(out_ptr + at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=there)
    at, there = _statistics_at(bundle, group, slots, SPAN, HEADS, ROWS)
    tl.store(lse_ptr + at, largest + tl.log2(total), mask=there)


@triton.jit
def query_kernel(
    q_ptr, q_row, q_head, ck_ptr, ck_row, ck_head, cv_ptr, cv_row, cv_head, k_ptr, k_row, k_head, v_ptr, v_row, v_head,
    out_ptr, out_row, out_head, do_ptr, do_row, do_head, lse_ptr, delta_ptr, dq_ptr, dq_row, dq_head,
    dk_ptr, dk_row, dk_head, dv_ptr, dv_row, dv_head, first_ptr, high_ptr, slots, scale,
    B: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, LOG2_E: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """delta [N, slots] = rows of sum(d_out * out); dq; dk and dv of the bundle's own keys, [slots, groups, D]."""
    SPAN: tl.constexpr = B * BLOCKS
    bundle, group = tl.program_id(0), tl.program_id(1)
    key_head = group // PARTS
    factor = scale * LOG2_E
    q = _load_rows(q_ptr, q_row, q_head, bundle, group, slots, SPAN, HEADS, ROWS, D)
    d_out = _load_rows(do_ptr, do_row, do_head, bundle, group, slots, SPAN, HEADS, ROWS, D)
    out = _load_rows(out_ptr, out_row, out_head, bundle, group, slots, SPAN, HEADS, ROWS, D).to(tl.float32)
    delta = tl.sum(d_out.to(tl.float32) * out, axis=1)
    at, there = _statistics_at(bundle, group, slots, SPAN, HEADS, ROWS)
    lse = tl.load(lse_ptr + at, mask=there, other=float("inf"))
    tl.store(delta_ptr + at, delta, mask=there)
    own_k = _load_own(k_ptr, k_row, k_head, bundle, key_head, slots, SPAN, OWN, D)
    own_v = _load_own(v_ptr, v_row, v_head, bundle, key_head, slots, SPAN, OWN, D)
    own_sees = _own_seen(B, SPAN, CAUSAL, ROWS, OWN) & there[:, None]
    own_p = tl.where(own_sees, tl.exp2(tl.dot(q, tl.trans(own_k)) * factor - lse[:, None]), 0.0)
    own_ds = (own_p * (tl.dot(d_out, tl.trans(own_v)) - delta[:, None])).to(own_k.dtype)
    dq = tl.dot(own_ds, own_k)
    dk, dv = tl.dot(tl.trans(own_ds), q) * scale, tl.dot(tl.trans(own_p.to(d_out.dtype)), d_out)
    _store_own(dk_ptr, dk_row, dk_head, dk, bundle, group, slots, SPAN, OWN, D)
    _store_own(dv_ptr, dv_row, dv_head, dv, bundle, group, slots, SPAN, OWN, D)
    low, high = _seen(first_ptr, high_ptr, bundle, slots, B, SPAN, WINDOW, ROWS)
    begin, whole_begin, whole_end, end = _context_tiles(low, high, KEYS)
    for start in range(whole_begin, whole_end, KEYS):
        key = start + tl.arange(0, KEYS)
        k = tl.load(ck_ptr + _keys_at(key, ck_row, ck_head, key_head, D))
        v = tl.load(cv_ptr + _keys_at(key, cv_row, cv_head, key_head, D))
        p = tl.exp2(tl.dot(q, tl.trans(k)) * factor - lse[:, None])
        ds = (p * (tl.dot(d_out, tl.trans(v)) - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq)
    for number in range(0, tl.cdiv(whole_begin - begin + end - whole_end, KEYS)):
        key = _edge_tile(number, begin, whole_begin, whole_end, KEYS) + tl.arange(0, KEYS)
        k = tl.load(ck_ptr + _keys_at(key, ck_row, ck_head, key_head, D))
        v = tl.load(cv_ptr + _keys_at(key, cv_row, cv_head, key_head, D))
        sees = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        p = tl.where(sees, tl.exp2(tl.dot(q, tl.trans(k)) * factor - lse[:, None]), 0.0)
        ds = (p * (tl.dot(d_out, tl.trans(v)) - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq)
    at, there = _rows_at(dq_row, dq_head, bundle, group, slots, SPAN, HEADS, ROWS, D)
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=there)


@triton.jit
def context_kernel(
    q_ptr, q_row, q_head, ck_ptr, ck_row, ck_head, cv_ptr, cv_row, cv_head, do_ptr, do_row, do_head, lse_ptr, delta_ptr,
    dk_ptr, dk_row, dk_head, dv_ptr, dv_row, dv_head, first_ptr, high_ptr, counts_ptr, slots, scale,
    B: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, LOG2_E: tl.constexpr, GRAIN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of context keys, [T, M, D], from all bundles that see it, one group after the other."""
    SPAN: tl.constexpr = B * BLOCKS
    tile, key_head = tl.program_id(0), tl.program_id(1)
    factor = scale * LOG2_E
    key = tile * KEYS + tl.arange(0, KEYS)
    k = tl.load(ck_ptr + _keys_at(key, ck_row, ck_head, key_head, D))
    v = tl.load(cv_ptr + _keys_at(key, cv_row, cv_head, key_head, D))
    dk = tl.zeros((KEYS, D), dtype=tl.float32)
    dv = tl.zeros((KEYS, D), dtype=tl.float32)
    begin, end, whole_begin, whole_end = _bundles_that_see(counts_ptr, tile, BLOCKS, KEYS, GRAIN)
    for number in range(whole_begin * PARTS, whole_end * PARTS):
        bundle, group = number // PARTS, key_head * PARTS + number % PARTS
        q = _load_rows(q_ptr, q_row, q_head, bundle, group, slots, SPAN, HEADS, ROWS, D)
        d_out = _load_rows(do_ptr, do_row, do_head, bundle, group, slots, SPAN, HEADS, ROWS, D)
        at, there = _statistics_at(bundle, group, slots, SPAN, HEADS, ROWS)
        lse = tl.load(lse_ptr + at, mask=there, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=there, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * factor - lse[None, :])
        dv = tl.dot(p.to(d_out.dtype), d_out, dv)
        ds = (p * (tl.dot(v, tl.trans(d_out)) - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
    for number in range(begin * PARTS, (end - whole_end + whole_begin) * PARTS):
        bundle, group = number // PARTS, key_head * PARTS + number % PARTS
        bundle += tl.where(bundle < whole_begin, 0, whole_end - whole_begin)
        q = _load_rows(q_ptr, q_row, q_head, bundle, group, slots, SPAN, HEADS, ROWS, D)
        d_out = _load_rows(do_ptr, do_row, do_head, bundle, group, slots, SPAN, HEADS, ROWS, D)
        at, there = _statistics_at(bundle, group, slots, SPAN, HEADS, ROWS)
        lse = tl.load(lse_ptr + at, mask=there, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=there, other=0.0)
        low, high = _seen(first_ptr, high_ptr, bundle, slots, B, SPAN, WINDOW, ROWS)
        sees = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])
        p = tl.where(sees, tl.exp2(tl.dot(k, tl.trans(q)) * factor - lse[None, :]), 0.0)
        dv = tl.dot(p.to(d_out.dtype), d_out, dv)
        ds = (p * (tl.dot(v, tl.trans(d_out)) - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
    tl.store(dk_ptr + _keys_at(key, dk_row, dk_head, key_head, D), (dk * scale).to(dk_ptr.dtype.element_ty))
    tl.store(dv_ptr + _keys_at(key, dv_row, dv_head, key_head, D), dv.to(dv_ptr.dtype.element_ty))
