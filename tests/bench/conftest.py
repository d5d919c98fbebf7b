import pytest

from da_jax.bench import drive


@pytest.fixture(scope="session")
def tiny_model():
    """The shipped checkpoint."""
    return drive.load("tiny")


@pytest.fixture(scope="session")
def tiny_engine(tiny_model):
    """An engine for two sequences of it that cannot prefill."""
    return drive.build(tiny_model, 2, 512, prefill=False, prefix_cache=False)
