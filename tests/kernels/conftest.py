import itertools

import jax
import pytest

_BETWEEN_CLEARINGS = 50
_count = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_programs_at_a_time():
    """Forgets compiled programs now and then: the system limits the memory maps of a process."""
    yield
    if next(_count) % _BETWEEN_CLEARINGS == 0:
        jax.clear_caches()
