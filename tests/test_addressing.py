"""Page pools beyond 2^31 and 2^32 bytes: rows are written and found where they belong."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ds41jax.formats import Format, QuantizedArray, decode, encode
from ds41jax.kernels.compute import REFERENCE
from ds41jax.kernels.sparse_attention import take_rows
from ds41jax.model.state import PAGE_ROWS, write_pages

WIDTH = 512
PAGES = 2**32 // (PAGE_ROWS * WIDTH // 2) + 64  # packed codes just beyond 2^32 bytes


@partial(jax.jit, donate_argnums=0)
def write(pool, page, row, rows):
    return write_pages(pool, page, row, rows, REFERENCE)


@jax.jit
def read(pool, index):
    flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), pool)
    return take_rows(flat, index)


def test_rows_on_both_sides_of_the_32_bit_borders():
    pool = QuantizedArray(
        jnp.zeros((PAGES, PAGE_ROWS, WIDTH // 2), jnp.uint8),
        jnp.zeros((PAGES, PAGE_ROWS, WIDTH // 16), jnp.float8_e4m3fn),
        format=Format.KV_FP4,
    )
    assert pool.codes.nbytes > 2**32
    border = 2**31 // (PAGE_ROWS * WIDTH // 2)
    page = np.array([0, border - 1, border, 2 * border - 1, 2 * border, PAGES - 1], np.int32)
    row = np.array([3, PAGE_ROWS - 1, 0, PAGE_ROWS - 1, 0, PAGE_ROWS - 1], np.int32)
    values = np.random.default_rng(0).normal(size=(len(page), WIDTH)).astype(np.float32)
    rows = encode(jnp.asarray(values), Format.KV_FP4)
    pool = write(pool, page, row, rows)
    found = read(pool, page * PAGE_ROWS + row)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(decode(rows)))
    neighbours = np.asarray(read(pool, page * PAGE_ROWS + (row - 1) % PAGE_ROWS))
    assert not neighbours.any()
