"""The matrix products of one micro-step, and attention's operations: what its time comes from.

Legend: T context tokens, A anchors, B block size, Q = A * B, H width, I inner width, K taps, V vocabulary,
N / M query / key heads, d head width.
"""

from dataclasses import dataclass

from draftcache.train.model.drafter import DrafterConfig


@dataclass(frozen=True, slots=True)
class Product:
    """A product [rows, inner] x [inner, columns], `count` times."""

    name: str
    rows: int
    columns: int
    inner: int
    count: int
    accumulates: bool = False  # a weight gradient, summed into float32
    float8: bool = False

    @property
    def operations(self) -> int:
        """Multiplications and additions of all of them."""
        return 2 * self.rows * self.columns * self.inner * self.count


def products(
    d: DrafterConfig,
    tokens: int,  # T
    anchors: int,  # A
    teacher: str,  # tokens, last or top
    matmul: str,
    chunk_slots: int,
    teacher_rows: int | None = None,  # a chunk's distinct ones; None: as many as its slots
) -> list[Product]:
    """Every product that one micro-step executes, attention apart."""
    layers, slots = len(d.layer_types), anchors * d.block_size
    query, key = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    found: list[Product] = []

    def linear(name: str, rows: int, columns: int, inner: int, count: int, float8: bool = False) -> None:
        found.append(Product(f"{name} forward", rows, columns, inner, count, float8=float8))
        if name != "fc":  # nothing asks for the taps' gradient
            found.append(Product(f"{name} input gradient", rows, inner, columns, count, float8=float8))
        found.append(Product(f"{name} weight gradient", columns, inner, rows, count, accumulates=True))

    float8 = matmul == "fp8"
    linear("fc", tokens, d.hidden_size, len(d.layer_ids) * d.hidden_size, 1)
    linear("context keys", tokens, 2 * key, d.hidden_size, layers)
    linear("query-key-value of the first layer", anchors + 1, query + 2 * key, d.hidden_size, 1)
    if layers > 1:
        linear("query-key-value", slots, query + 2 * key, d.hidden_size, layers - 1)
    for of_layer, rows, count in (("", slots, layers - 1), (" of the last layer", slots - anchors, 1)):
        if count:
            linear(f"out{of_layer}", rows, d.hidden_size, query, count)
            linear(f"gate-up{of_layer}", rows, 2 * d.intermediate_size, d.hidden_size, count, float8)
            linear(f"down{of_layer}", rows, d.hidden_size, d.intermediate_size, count, float8)
    blocks = min(anchors, max(1, chunk_slots // d.block_size))
    rows, chunks = blocks * (d.block_size - 1), -(-anchors // blocks)
    if teacher == "last":
        distinct = rows if teacher_rows is None else teacher_rows
        found.append(Product("teacher forward", distinct, d.vocab_size, d.hidden_size, chunks, float8=float8))
    found.append(Product("head forward", rows, d.vocab_size, d.hidden_size, chunks, float8=float8))
    found.append(Product("head input gradient", rows, d.hidden_size, d.vocab_size, chunks, float8=float8))
    return found


def attention_operations(d: DrafterConfig, anchors: int, prefix: float) -> float:
    """Forward and backward over all layers, for a mean of `prefix` visible context tokens per block."""
    total = 0.0
    for layer_type in d.layer_types:
        window = d.rule(layer_type).window
        seen = prefix if window is None else min(prefix, window)
        total += anchors * d.block_size * (seen + d.block_size)
    return total * 4 * d.num_heads * d.head_dim * 3.5
