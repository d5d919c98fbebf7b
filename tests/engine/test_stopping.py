from hypothesis import given
from hypothesis import strategies as st

from da_jax.engine.stopping import StopStrings

text = st.text(alphabet="abE ND", max_size=30)


def cut(whole: str, size: list[int]) -> list[str]:
    pieces, start = [], 0
    for step in size:
        pieces.append(whole[start : start + step])
        start += step
    return [*pieces, whole[start:]]


@given(
    text,
    st.lists(st.text("abEND", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 4)),
)
def test_what_is_shown_ends_before_the_first_stop_string_however_it_is_split(whole, stops, sizes):
    stopper = StopStrings(stops)
    shown = [piece for part in cut(whole, sizes) for piece, _ in stopper.push(part, None)]
    shown += [piece for piece, _ in stopper.flush()]
    firsts = [whole.find(stop) for stop in stops if stop in whole]
    # A stop string that ends earlier may be seen before one that begins earlier.
    if not firsts:
        assert "".join(shown) == whole and stopper.found is None
    else:
        assert stopper.found in stops
        at = len("".join(shown))
        assert whole.startswith("".join(shown)) and whole.startswith(stopper.found, at)
        ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
        assert not any(stop in whole[: min(ends) - 1] for stop in stops)


def test_nothing_of_a_stop_string_leaks():
    stopper = StopStrings(["END"])
    assert stopper.push("ok E", 1) == [("ok ", 1)]
    assert stopper.push("N", 2) == []
    assert stopper.push("D!", 3) == []
    assert stopper.found == "END"
    assert stopper.push("more", 4) == [] and stopper.flush() == []
    assert stopper.withheld == len("END!more")


def test_text_that_only_looked_like_a_stop_string_keeps_its_tags():
    stopper = StopStrings(["END"])
    stopper.push("E", 1)
    stopper.push("N", 2)
    assert stopper.push("T", 3) == [("E", 1), ("N", 2), ("T", 3)]
