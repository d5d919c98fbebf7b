import jax
import jax.numpy as jnp
import numpy as np
import pytest

from da_jax.engine.sampling import SamplingRows, choose, key_of

V = 50
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, V)).astype(np.float32) * 2


def rows(batch=4, **changes):
    base = dict(
        temperature=np.ones(batch, np.float32),
        top_p=np.ones(batch, np.float32),
        presence_penalty=np.zeros(batch, np.float32),
        top_k=np.zeros(batch, np.int32),
        key=np.stack([key_of(seed) for seed in range(batch)]),
        generated=np.zeros(batch, np.int32),
    )
    for name, value in changes.items():
        base[name] = np.broadcast_to(np.asarray(value, base[name].dtype), base[name].shape)
    return SamplingRows(**base)


choose = jax.jit(choose)
NOTHING_SEEN = jnp.zeros((4, V), bool)


def draws(logits, count=400, **changes):
    """int [count, B] tokens at consecutive positions of the response."""
    params = rows(**changes)
    steps = [params._replace(generated=np.full(4, i, np.int32)) for i in range(count)]
    return np.stack([choose(logits, NOTHING_SEEN, step) for step in steps])


def test_temperature_zero_is_greedy_and_a_tiny_one_is_finite_and_greedy():
    best = LOGITS.argmax(-1)
    for temperature in (0.0, 1e-6):
        np.testing.assert_array_equal(
            choose(LOGITS, NOTHING_SEEN, rows(temperature=temperature)), best
        )


def test_a_greedy_row_stays_greedy_beside_sampling_rows():
    chosen = choose(LOGITS, NOTHING_SEEN, rows(temperature=[0.0, 5.0, 5.0, 0.0]))
    assert chosen[0] == LOGITS[0].argmax() and chosen[3] == LOGITS[3].argmax()


@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_top_k_draws_from_exactly_the_k_likeliest(top_k):
    drawn = draws(LOGITS, top_k=top_k, temperature=3.0)
    for row in range(4):
        assert set(drawn[:, row]) == set(np.argsort(-LOGITS[row])[:top_k].tolist())


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.8])
def test_top_p_draws_from_the_smallest_set_with_that_probability(top_p):
    drawn = draws(LOGITS, top_p=top_p)
    for row in range(4):
        order = np.argsort(-LOGITS[row])
        p = np.exp(LOGITS[row][order] - LOGITS[row].max())
        nucleus = order[: np.searchsorted(np.cumsum(p / p.sum()), top_p) + 1]
        assert set(drawn[:, row]) <= set(nucleus.tolist())
        assert len(set(drawn[:, row])) > len(nucleus) // 2


def test_frequencies_follow_the_distribution():
    logits = np.tile(np.log([0.5, 0.3, 0.2] + [1e-9] * (V - 3)).astype(np.float32), (4, 1))
    drawn = draws(logits, count=1000).ravel()
    share = np.bincount(drawn, minlength=V)[:3] / drawn.size
    np.testing.assert_allclose(share, [0.5, 0.3, 0.2], atol=0.03)


def test_the_same_logits_give_other_tokens_at_other_positions():
    assert len(set(draws(LOGITS, count=50)[:, 0].tolist())) > 5


def test_a_seed_decides_whatever_the_neighbours():
    alone = draws(LOGITS, count=50)[:, 1]
    params = rows(temperature=[0.0, 1.0, 9.0, 2.0], top_k=[5, 0, 1, 2])
    params = params._replace(key=np.stack([key_of(s) for s in (77, 1, 78, 79)]))
    other = np.roll(LOGITS, 3, axis=1)
    other[1] = LOGITS[1]
    beside = [
        int(choose(other, NOTHING_SEEN, params._replace(generated=np.full(4, i, np.int32)))[1])
        for i in range(50)
    ]
    np.testing.assert_array_equal(alone, beside)


def test_presence_penalty_counts_a_seen_token_once():
    seen = np.zeros((4, V), bool)
    best = LOGITS.argmax(-1)
    seen[np.arange(4), best] = True
    gap = np.sort(LOGITS)[:, -1] - np.sort(LOGITS)[:, -2]
    chosen = choose(LOGITS, seen, rows(temperature=0.0, presence_penalty=2.0))
    np.testing.assert_array_equal(np.asarray(chosen) == best, gap > 2.0)


def test_forbidden_tokens_are_never_drawn():
    logits = np.full((4, V), -np.inf, np.float32)
    logits[:, :2] = 0
    assert set(draws(logits, count=100, temperature=5.0).ravel().tolist()) == {0, 1}


def test_seeds_of_any_size_give_distinct_keys():
    keys = {tuple(key_of(seed)) for seed in (0, 1, -1, 2**32, 2**63, 2**64 - 2)}
    assert len(keys) == 6
