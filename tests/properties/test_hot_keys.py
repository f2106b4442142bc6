"""The promises of the counts and of the split point, whatever keys and weights come."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kclrun.codec.kpl import effective_hash_key
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.traffic.hot_keys import KeyCounts, Sampling, split_point
from tests.examples import examples

streams = st.lists(
    st.tuples(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), st.integers(0, 50)), max_size=300
)


@examples(300)
@given(streams)
def test_every_key_has_the_weight_that_it_came_with(stream):
    counts, true = KeyCounts(), Counter()
    for key, weight in stream:
        counts.add((key, ""), weight)
        true[key] += weight

    assert {key: weight for (key, _), weight in counts.weights.items()} == true
    assert counts.total == sum(true.values())


@examples(200)
@given(st.integers(1, 5_000), st.integers(1, 40))
def test_samples_are_places_of_the_page_in_their_order_and_none_comes_twice(count, pages):
    sampling = Sampling()
    for _ in range(pages):
        samples = sampling.of(range(count))

        assert samples == sorted(set(samples))
        assert samples[0] >= 0
        assert samples[-1] < count


hash_keys = st.integers(0, HASH_KEY_MAX)
weighed = st.dictionaries(hash_keys, st.integers(1, 1000), max_size=12)


@examples(300)
@given(weighed, st.integers(0, 1000), hash_keys, hash_keys)
def test_a_split_point_is_taken_by_the_service_and_no_other_halves_better(
    weights, rest, one, other
):
    hash_range = HashRange(*sorted((one, other)))
    total = max(sum(weights.values()) + rest, 1)
    shares = {key: weight / total for key, weight in weights.items()}

    at, heavier = split_point(shares, hash_range)

    start, end = hash_range.start, hash_range.end
    assert (at is None) == (end - start < 3)
    if at is None:
        return
    assert start + 1 < at < end
    assert 0.5 - 1e-9 <= heavier <= 1.0
    inside = {key: share for key, share in shares.items() if key in hash_range}
    spread = 1 - sum(inside.values())
    for tried in {start + 2, end - 1, *inside, *(key + 1 for key in inside)}:
        if start + 1 < tried < end:
            below = sum(share for key, share in inside.items() if key < tried)
            below += spread * (tried - start) / (end - start + 1)
            assert heavier <= max(below, 1 - below) + 1e-9


@examples(200)
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.integers(1, 9), min_size=2, max_size=60))
def test_where_every_key_is_counted_the_two_sides_of_a_split_weigh_what_is_said(weights):
    total = sum(weights.values())
    placed = Counter()
    for key, weight in weights.items():
        placed[effective_hash_key(key, None)] += weight / total

    at, heavier = split_point(placed, HashRange(0, HASH_KEY_MAX))

    below = sum(share for place, share in placed.items() if place < at)
    assert abs(max(below, 1 - below) - heavier) < 1e-6
    assert heavier <= 0.5 + max(placed.values()) / 2 + 1e-6
