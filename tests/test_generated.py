"""The generated tensors equal the recorded ones."""

import ml_dtypes
import numpy as np
import pytest
from generated import generated, tensors

CODE_KINDS = ("fp8", "e4m3s")  # the manifest records these by their bits
DTYPES = {
    "fp8": ml_dtypes.float8_e4m3fn,
    "e4m3s": ml_dtypes.float8_e4m3fn,
    "fp4": np.uint8,
    "e8m0": np.uint8,
    "bf16": ml_dtypes.bfloat16,
    "norm": ml_dtypes.bfloat16,
    "tri": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f32pos": np.float32,
}


def test_manifest_is_whole() -> None:
    assert len(tensors()) == 424
    assert {tensor.kind for tensor in tensors().values()} == set(DTYPES)
    assert all(len(tensor.check) == 3 for tensor in tensors().values())


@pytest.mark.parametrize("name", tensors())
def test_recorded_elements(name: str) -> None:
    tensor = tensors()[name]
    row_size = int(np.prod(tensor.shape[1:], dtype=np.int64))
    for flat_index, expected in tensor.check:
        row, column = divmod(flat_index, row_size)
        made = generated(name, slice(row, row + 1))
        assert made.shape == (1, *tensor.shape[1:])
        assert made.dtype == DTYPES[tensor.kind]
        flat = made.view(np.uint8) if tensor.kind in CODE_KINDS else made
        assert float(flat.reshape(-1)[column]) == expected


@pytest.mark.parametrize("name", ["layers.2.attn.attn_sink", "h.x", "a.compress_kv.scale"])
def test_a_range_of_rows_is_part_of_the_whole(name: str) -> None:
    """Row ranges that do not start on an 8-byte word included."""
    whole = generated(name)
    assert whole.shape == tensors()[name].shape
    np.testing.assert_array_equal(generated(name, slice(3, 6)), whole[3:6])
    np.testing.assert_array_equal(generated(name, slice(-2, None)), whole[-2:])


def test_rows_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"h\.x: rows"):
        generated("h.x", slice(5, 2))
    with pytest.raises(ValueError, match=r"h\.x: rows"):
        generated("h.x", slice(0, 4, 2))
