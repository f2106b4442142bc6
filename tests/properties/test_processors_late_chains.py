"""Late chains of flights, flight by flight and all at once."""

from hypothesis import given
from hypothesis import strategies as st

from processors import late_chains
from processors.late_chains import Departure


@given(st.lists(st.sampled_from([-3, 15, 16, 40]), max_size=30))
def test_flight_by_flight_the_longest_chain_is_that_of_all_at_once(minutes):
    flown = [Departure(60 * number, delay) for number, delay in enumerate(minutes)]
    progress, grown = late_chains._Progress(), []
    for departure in flown:
        former, progress = progress, progress.after(departure, 15)
        if progress.longest > former.longest:
            grown.append(late_chains._chain(progress, departure))

    at_once = max(late_chains._runs(flown, 15), key=lambda c: c.late_flights, default=None)
    assert (grown[-1] if grown else None) == at_once
    # Each length comes once: the row with the most flights is one row.
    assert [chain.late_flights for chain in grown] == list(range(1, len(grown) + 1))
