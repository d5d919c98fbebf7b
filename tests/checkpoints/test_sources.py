import ml_dtypes
import numpy as np
import pytest

from da_jax.checkpoints import sources
from da_jax.checkpoints.errors import CheckpointError
from da_jax.checkpoints.sources import Cast, Int8, Reported, Scales, Stack, Tensor, blocks, fetch


class View:
    """An array that remembers how many numbers were asked of it at once."""

    def __init__(self, array):
        self.array, self.sizes = array, []

    def __getitem__(self, index):
        self.sizes.append(self.array[index].size)
        return self.array[index]


def tensor(array, **options):
    return Tensor(View(array), array.shape, array.dtype, **options)


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def every(shape):
    return tuple(slice(0, size) for size in shape)


@pytest.mark.parametrize(
    ("shape", "order", "limit"),
    [((7, 5), (0, 1), 10), ((7, 5), (1, 0), 10), ((3, 4, 6), (0, 2, 1), 5), ((9,), (0,), 2)],
)
def test_blocks_cover_every_number_once_and_are_small(shape, order, limit):
    source = tensor(numbers(*shape))
    source.order = order
    seen = np.zeros(shape, int)
    for block in blocks(source, limit=limit):
        assert seen[block].size <= limit
        seen[block] += 1
    assert (seen == 1).all()


def test_blocks_of_a_part_start_at_the_borders_of_units():
    source = tensor(numbers(20, 12))
    seen = np.zeros((20, 12), int)
    for block in blocks(source, units=(4, 6), limit=40):
        assert block[0].start % 4 == 0 and block[1].start % 6 == 0
        seen[block] += 1
    assert (seen == 1).all()
    part = (slice(3, 17), slice(5, 6))
    assert sum(b[0].stop - b[0].start for b in blocks(source, part, limit=4)) == 14


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("rows", [None, [4, 5, 6, 0, 1, 9]])
def test_a_tensor_gives_its_rows_transposed_and_reads_no_more(transpose, rows):
    array = numbers(2, 10, 6)
    chosen = None if rows is None else np.array(rows)
    source = tensor(array, rows=chosen, transpose=transpose)
    expected = array if rows is None else array[:, rows]
    expected = expected.swapaxes(1, 2) if transpose else expected
    assert source.shape == expected.shape
    np.testing.assert_array_equal(source.read(every(expected.shape)), expected)
    source._view.sizes.clear()
    index = (slice(1, 2), slice(1, 4), slice(2, 6))
    np.testing.assert_array_equal(source.read(index), expected[index])
    assert sum(source._view.sizes) == expected[index].size


def test_stacked_sources_read_only_the_ones_asked_for():
    arrays = [numbers(4, 3) + i for i in range(5)]
    parts = [tensor(array, transpose=True) for array in arrays]
    stack = Stack(parts)
    assert stack.shape == (5, 3, 4) and stack.order == (0, 2, 1)
    index = (slice(1, 3), slice(0, 2), slice(1, 4))
    expected = np.stack([array.T for array in arrays])
    np.testing.assert_array_equal(stack.read(index), expected[index])
    assert [len(part._view.sizes) for part in parts] == [0, 1, 1, 0, 0]


def test_fetch_reads_a_block_at_a_time_into_one_contiguous_array(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 8)
    array = numbers(6, 5)
    source = tensor(array, transpose=True)
    part = fetch(source, (slice(None), slice(1, 4)))
    np.testing.assert_array_equal(part, array.T[:, 1:4])
    assert part.flags.c_contiguous and max(source._view.sizes) <= 8
    cast = fetch(Cast(source, ml_dtypes.bfloat16))
    np.testing.assert_array_equal(cast, array.T.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_int8_is_within_half_a_step_and_uses_the_whole_range(axis, dtype, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 16)
    array = (numbers(3, 8, 10) * np.logspace(-3, 3, 10, dtype=np.float32)).astype(dtype)
    array[:, :, 4] = array[1, 2] = 0
    scales = Scales(tensor(array), axis)
    values, scale = fetch(Int8(scales)), fetch(scales)
    assert values.dtype == np.int8 and scale.dtype == np.float32
    wide = array.astype(np.float64)
    largest = np.abs(wide).max(axis)
    np.testing.assert_allclose(scale[largest > 0], largest[largest > 0] / 127, rtol=1e-6)
    step = np.expand_dims(scale, axis).astype(np.float64)
    assert np.all(np.abs(values * step - wide) <= step * (0.5 + 1e-5))
    assert np.all((np.abs(values).max(axis) == 127) == (largest > 0))
    assert not values[wide == 0].any()


def test_a_part_of_int8_is_the_part_of_the_whole():
    source = tensor(numbers(12, 10))
    whole, part = Int8(Scales(source, -2)), Int8(Scales(source, -2))
    index = (slice(3, 7), slice(2, 9))
    np.testing.assert_array_equal(part.read(index), fetch(whole)[index])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_cast_keeps_what_was_infinite_and_refuses_what_becomes_so(dtype):
    array = np.array([1, np.inf, np.nan, -1e30], np.float32)
    fits = fetch(Cast(tensor(array[:3]), dtype))
    assert fits.dtype == dtype and fits[0] == 1 and fits[1] == np.inf and np.isnan(fits[2])
    array[0] = np.finfo(np.float32).max
    with pytest.raises(CheckpointError, match=f"w has numbers beyond the range of {fits.dtype}"):
        fetch(Cast(tensor(array), dtype, "w"))


def test_a_source_that_cannot_be_read_is_named(tmp_path):
    class Broken(View):
        def __getitem__(self, index):
            raise OSError("I/O error")

    source = Tensor(Broken(numbers(2, 2)), (2, 2), np.dtype(np.float32))
    with pytest.raises(CheckpointError, match=f"cannot read w of {tmp_path}: I/O error"):
        fetch(Reported(source, "w", tmp_path))
