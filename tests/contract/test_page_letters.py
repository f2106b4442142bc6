"""Dead letters on the page, for each place that letters can be in, on the embedded AWS."""

from contextlib import closing

import pytest

from kclrun.cli.config_options import ConfigChoice
from kclrun.cli.page import letters as page_letters
from kclrun.cli.page.letters import PageLetters
from kclrun.errors import SettingsError
from tests.contract.test_letter_store import Place, no_wait  # noqa: F401 - a fixture
from tests.support.letters import letter


def configured(place, aws, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    names = ("path", "s3", "sqs", "stream")
    named = {name: getattr(place.place, name) for name in names if getattr(place.place, name)}
    config = tmp_path / "app.yaml"
    config.write_text(
        "application: shop\nstream: orders\nprocessor: kclrun.samples.hello:Hello\n"
        f"on_error: {{then: dead-letter, dead_letter: {named}}}\n"
        f"aws: {{region: us-east-1, endpoint: '{aws.endpoint}'}}\n"
    )
    config.chmod(0o600)
    return PageLetters(ConfigChoice(config).load())


@pytest.mark.parametrize("kind", ["folder", "s3", "sqs", "fifo", "stream"])
def test_the_page_shows_what_it_can_see_and_takes_no_letter_from_a_reader(
    kind, aws, tmp_path, monkeypatch
):
    place = Place(kind, aws, tmp_path)
    with closing(place.store()) as store:
        for number in range(3):
            store.keep(letter(number))
    page = configured(place, aws, tmp_path, monkeypatch)

    if kind in {"sqs", "fifo"}:
        assert not page.are_here
        assert page.waiting() == "About 3 are in the queue."
    else:
        lines, are_more = page.listed()
        assert ([line.position for line in lines], are_more) == (
            [letter(number).position for number in range(3)],
            False,
        )
        assert page.plan("", "stream").is_possible
    with closing(place.store()) as store:
        assert len(list(store.kept())) == 3
        assert not page.waiting() or page.waiting() == (
            "About 0 are in the queue, and about 3 more that a reader has received."
        )


def test_a_stream_of_too_many_letters_for_a_page_is_reported_and_not_read(
    aws, tmp_path, monkeypatch
):
    place = Place("stream", aws, tmp_path)
    with closing(place.store()) as store:
        store.keep(letter(1))
    page = configured(place, aws, tmp_path, monkeypatch)
    monkeypatch.setattr(page_letters, "_STREAM_BYTES_MAX", 100)

    with pytest.raises(SettingsError, match="holds more than 100 bytes"):
        page.listed()
