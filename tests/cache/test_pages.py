import pytest
from hypothesis import given
from hypothesis import strategies as st

from da_jax.cache.pages import PagePool, PoolExhausted


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_pages_have_one_owner_and_come_back(actions):
    pool, owned = PagePool(10), []
    for take, amount in actions:
        held = [page for pages in owned for page in pages]
        if take and amount > 10 - len(held):
            with pytest.raises(PoolExhausted):
                pool.allocate(amount)
        elif take:
            owned.append(pool.allocate(amount))
        elif owned:
            pool.free(owned.pop(amount % len(owned)))
        held = [page for pages in owned for page in pages]
        assert len(set(held)) == len(held) and set(held) <= set(range(10))
        assert pool.num_free == 10 - len(held)


def test_freeing_twice_or_what_was_never_taken_is_an_error():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(ValueError, match="not in use"):
        pool.free(pages)
    with pytest.raises(ValueError, match="num_pages is 0"):
        PagePool(0)
