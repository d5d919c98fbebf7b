"""Paged-attention cases and the float64 answer to each, worked out without pages.

A case starts from contiguous keys and values and the token spans each sequence may see. Only then
are the visible tokens put into a pool of pages that is NaN everywhere else (8-bit pools, where int8
has no NaN, get NaN scales there).
"""

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from da_jax.kernels.paged_attention import BlockMask, KVPages, QuantizedPages, compact, stack

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


@dataclass
class Sequence:
    """One sequence: its keys and values `[L, HKV, D]`, what it may see, and its queries.

    What the pool holds of a key or value is the product divided by its scale `[L, HKV]`.
    """

    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray
    value_scales: np.ndarray
    spans: list[tuple[int, int]]
    length: int
    queries: int
    table: np.ndarray

    def seen(self, t: int, window: int | None) -> np.ndarray:
        """Positions that query `t` sees."""
        shown = np.zeros(len(self.keys), bool)
        for start, end in self.spans:
            shown[start:end] = True
        here = self.length - self.queries + t
        position = np.arange(len(self.keys))
        shown &= position <= here
        if window is not None:
            shown &= position > here - window
        return np.flatnonzero(shown)


@dataclass
class Case:
    """Arguments of `paged_attention`, and the sequences they were made from."""

    q: np.ndarray
    pool: KVPages
    mask: BlockMask
    lengths: np.ndarray
    q_lens: np.ndarray
    sequences: list[Sequence]
    options: dict = field(default_factory=dict)

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        """The output and lse in float64."""
        q = np.asarray(self.q, np.float64)
        out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
        group = q.shape[2] // self.sequences[0].keys.shape[1]
        softcap, window = self.options.get("softcap"), self.options.get("window")
        for b, sequence in enumerate(self.sequences):
            for t in range(sequence.queries):
                seen = sequence.seen(t, window)
                if not len(seen):
                    continue
                for head in range(q.shape[2]):
                    k, v = (x[seen, head // group] for x in (sequence.keys, sequence.values))
                    score = self.options["scale"] * (k @ q[b, t, head])
                    if softcap is not None:
                        score = softcap * np.tanh(score / softcap)
                    weight = np.exp(score - score.max())
                    out[b, t, head] = weight @ v / weight.sum()
                    lse[b, t, head] = score.max() + np.log(weight.sum())
        return out, lse


def runs(shown: np.ndarray) -> list[tuple[int, int]]:
    """The maximal runs of True, as half-open spans."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], shown.astype(int), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def make_case(
    *,
    head_dim: int = 64,
    kv_heads: int = 2,
    group: int = 2,
    page_size: int = 16,
    queries: int = 1,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    packed: bool | None = None,
    seed: int = 0,
    **options,
) -> Case:
    """Builds a batch of every awkward kind of sequence (see `_plan`) in a shuffled pool.

    Pages have the dtype of the queries and the layout of `layout` unless something else is asked.
    """
    rng = np.random.default_rng(seed)
    kv_dtype = kv_dtype or dtype
    packed = head_dim <= 64 if packed is None else packed
    plan = _plan(rng, page_size, queries)
    blocks = [-(-tokens // page_size) for tokens, *_ in plan]
    pages = sum(blocks) + 3
    ids = iter(rng.permutation(pages))
    sequences = []
    for (tokens, length, asked, spans), count in zip(plan, blocks):
        drawn = [_draw(rng, (tokens, kv_heads, head_dim), kv_dtype) for _ in range(2)]
        (keys, key_scales), (values, value_scales) = drawn
        table = np.array([next(ids) for _ in range(count)], np.int64)
        sequences.append(
            Sequence(keys, values, key_scales, value_scales, spans, length, asked, table)
        )
    _share(sequences[0], sequences[1], page_size)
    q = _round(rng.standard_normal((len(plan), queries, kv_heads * group, head_dim)), dtype)
    width = 2 + max(sum(-(-e // page_size) - s // page_size for s, e in x[3]) for x in plan)
    rows = [compact(s.table, s.spans, page_size, width) for s in sequences]
    return Case(
        q=jnp.asarray(q, dtype),
        pool=_pool(sequences, pages, page_size, options.get("window"), kv_dtype, packed),
        mask=shuffled(stack(rows), rng),
        lengths=np.array([s.length for s in sequences], np.int32),
        q_lens=np.array([s.queries for s in sequences], np.int32),
        sequences=sequences,
        options={"scale": head_dim**-0.5, **options},
    )


def shuffled(mask: BlockMask, rng: np.random.Generator) -> BlockMask:
    """The same mask with the entries of each sequence in another order."""
    columns = [np.array(x) for x in mask[:3]]
    for b, count in enumerate(mask.count):
        order = rng.permutation(count)
        for column in columns:
            column[b, :count] = column[b, order]
    return BlockMask(*columns, mask.count)


def _plan(
    rng: np.random.Generator, page_size: int, queries: int
) -> list[tuple[int, int, int, list[tuple[int, int]]]]:
    """`(tokens in the table, length, queries, visible spans)` of each sequence."""
    tokens = 4 * page_size + queries + 1
    holes = lambda: runs(np.repeat(rng.random(tokens) < 0.5, 3)[:tokens])
    return [
        (tokens, tokens, queries, [(0, tokens)]),  # sees everything; the last page is partial
        (tokens, tokens - 1, queries, holes()),  # holes, and pages shared with the first
        (tokens, tokens // 2 + queries // 2, queries, [(0, tokens)]),  # reserved beyond its length
        (queries, queries, queries, [(0, queries)]),  # no past
        (page_size, min(page_size, queries), min(page_size, queries), [(0, page_size)]),  # one page
        (tokens, tokens, 0 if queries > 1 else 1, []),  # nothing visible
        (page_size, 0, 0, []),  # an unused row of the batch
        (tokens, tokens, -(-queries // 2), holes()),  # fewer queries than the batch has room for
    ]


def _share(first: Sequence, second: Sequence, page_size: int) -> None:
    """Gives two sequences the same first two pages, and so the same tokens."""
    second.table[:2] = first.table[:2]
    for name in ("keys", "values", "key_scales", "value_scales"):
        getattr(second, name)[: 2 * page_size] = getattr(first, name)[: 2 * page_size]


def _pool(
    sequences: list[Sequence],
    pages: int,
    page_size: int,
    window: int | None,
    dtype: str,
    packed: bool,
) -> KVPages:
    """A pool that is NaN but for the tokens that some query sees."""
    _, kv_heads, head_dim = sequences[0].keys.shape
    lanes = 128 if packed else head_dim
    pool = np.full((pages, 1 if packed else 2, kv_heads, page_size, lanes), np.nan)
    padded = {3: 4, 5: 8, 6: 8, 7: 8}.get(kv_heads, kv_heads)
    scales = np.full((pages, 2, padded, -(-page_size // 128) * 128), np.nan)
    for s in sequences:
        for t in range(s.queries):
            at = s.seen(t, window)
            page, slot = s.table[at // page_size], at % page_size
            pool[page, :, :, slot] = 0
            sides = ((s.keys, s.key_scales), (s.values, s.value_scales))
            for side, (x, scale) in enumerate(sides):
                row, lane = (0, 64 * side) if packed else (side, 0)
                pool[page, row, :, slot, lane : lane + head_dim] = x[at] / scale[at][..., None]
                scales[page, side, :kv_heads, slot] = scale[at]
    if dtype == "int8":
        pool = np.nan_to_num(np.round(pool), nan=77)
    values = jnp.asarray(pool, dtype)
    quantized = dtype in ("int8", "float8_e4m3fn")
    return QuantizedPages(values, jnp.asarray(scales, jnp.float32)) if quantized else values


def _draw(
    rng: np.random.Generator, size: tuple[int, ...], dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Heads `[L, HKV, D]` that a pool of this dtype can hold, and their scales `[L, HKV]`."""
    normal = rng.standard_normal(size)
    if dtype == "int8":
        codes = np.clip(np.round(normal * 40), -127, 127)
    elif dtype == "float8_e4m3fn":
        codes = _round(np.clip(normal * 100, -448, 448), dtype)
    else:
        return _round(normal, dtype), np.ones(size[:2])
    scales = _round(rng.uniform(0.5, 1.5, size[:2]) / np.abs(codes).max(), "float32")
    return codes * scales[..., None] * 3, scales * 3


def _round(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x, dtype).astype(jnp.float32), np.float64)
