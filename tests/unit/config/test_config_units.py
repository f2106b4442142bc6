import pytest
from hypothesis import given
from hypothesis import strategies as st

from kclrun.config.units import ByteSize, Duration
from tests.support.tables import over_rows


@over_rows(
    ("text", "seconds"),
    [("10s", 10), ("250ms", 0.25), ("1m30s", 90), ("2h", 7200), ("1d", 86400), ("1.5s", 1.5)],
)
def test_durations_are_read_as_people_write_them(text, seconds):
    assert Duration.parse(text) == pytest.approx(seconds)


@over_rows("wrong", ["10", "s", "", "10 s", "-1s", "1w", 10, None, True, "1e3s", "\u0661s"])
def test_what_is_no_duration_is_refused_with_an_example(wrong):
    with pytest.raises(ValueError, match="10s, 250ms or 1m30s"):
        Duration.parse(wrong)


@over_rows(
    ("text", "size"),
    [
        ("16MiB", 2**24),
        ("512 KiB", 2**19),
        ("10MB", 10**7),
        ("2GiB", 2**31),
        ("7", 7),
        ("7B", 7),
        (7, 7),
        ("1.5kB", 1500),
    ],
)
def test_sizes_are_read_in_both_kinds_of_units(text, size):
    assert ByteSize.parse(text) == size


@over_rows("wrong", ["16mib", "MiB", "", True, None, 1.5, "-1"])
def test_what_is_no_size_is_refused_with_an_example(wrong):
    with pytest.raises(ValueError, match="16MiB or 512KiB"):
        ByteSize.parse(wrong)


@over_rows(("value", "text"), [
        *((Duration(seconds), text) for seconds, text in (
            (0, "0s"), (0.0005, "0.5ms"), (0.25, "250ms"), (1, "1s"), (60, "1m"), (90, "90s"),
            (3600, "1h"), (5400, "90m"), (86400, "1d"),
        )),
        *((ByteSize(size), text) for size, text in (
            (0, "0B"), (1000, "1000B"), (2**10, "1KiB"), (1536, "1536B"), (2**20, "1MiB"),
            (2**30, "1GiB"), (3 * 2**29, "1536MiB"),
        )),
    ])  # fmt: skip
def test_a_value_is_written_in_the_largest_unit_that_divides_it(value, text):
    assert value.text == text


@given(st.integers(min_value=0, max_value=10**9))
def test_a_duration_is_written_as_it_is_read(milliseconds):
    duration = Duration(milliseconds / 1000)

    assert Duration.parse(duration.text) == pytest.approx(duration, rel=1e-5)


@given(st.integers(min_value=0, max_value=2**40))
def test_a_size_is_written_as_it_is_read(size):
    assert ByteSize.parse(ByteSize(size).text) == size


@pytest.mark.parametrize("text", ["36501d", "9" * 400 + "d", "36500d1ms"])
def test_a_duration_is_at_most_100_years_which_every_wait_and_date_takes(text):
    assert Duration.parse("36500d") == 36_500 * 86_400
    with pytest.raises(ValueError, match="at most 36500d"):
        Duration.parse(text)


@pytest.mark.parametrize("size", [2**63, "9" * 400 + "MiB", "99999999999GiB"])
def test_a_size_has_at_most_63_bits(size):
    assert ByteSize.parse(2**63 - 1) == 2**63 - 1
    with pytest.raises(ValueError, match="less than 8 EiB"):
        ByteSize.parse(size)
