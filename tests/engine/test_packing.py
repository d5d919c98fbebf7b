import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from da_jax.engine.packing import pack, unpack

ARRAYS = st.sampled_from([np.int32, np.uint32, np.float32, np.bool_]).flatmap(
    lambda dtype: st_numpy.arrays(dtype, st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0))
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.tuples(ARRAYS, ARRAYS), min_size=1, max_size=4))
def test_what_is_packed_comes_back_bit_by_bit(tree):
    flat = pack(tree)
    assert flat.dtype == np.int32 and flat.size == sum(x.size for x in jax.tree.leaves(tree))
    back = unpack(flat, tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for left, right in zip(jax.tree.leaves(back), jax.tree.leaves(tree)):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert np.asarray(left).tobytes() == right.tobytes()
