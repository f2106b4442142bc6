"""Names of outputs in the test kit: where the settings have outputs, another name is refused."""

import pytest

from kclrun import RecordProcessor
from kclrun.cli.dead_letters import user_process
from kclrun.cli.dead_letters.user_process import LetterRows, RedriveJob, redriven
from kclrun.errors import SettingsError
from kclrun.model.letter import Letter, LetterSource
from kclrun.testing import Faults, assert_idempotent, make_record, replay, run_processor


class Sorted(RecordProcessor):
    """Sends each record to the output that its payload names."""

    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.context.emit({"n": 1}, to=bytes(record.data).decode())


class SortedSingly(RecordProcessor):
    def process_record(self, record, context):
        context.emit({"n": 1}, to=bytes(record.data).decode())


@pytest.mark.parametrize("kind", [Sorted, SortedSingly])
@pytest.mark.parametrize(
    ("name", "outputs", "words"),
    [
        ("lat", {"late": {}}, "there is no outputs.lat in the settings; did you mean 'late'?"),
        ("elsewhere", {"late": {"sqs": "q"}}, "The outputs are: late, output"),
        ("late", {}, "there is no outputs.late in the settings\nThe outputs are: output"),
        ("late", {"late": {}}, None),
        ("output", {}, None),
        ("lat", None, None),
    ],
)
def test_a_row_for_an_output_that_the_settings_do_not_have_is_refused(kind, name, outputs, words):
    if words is None:
        settings = {} if outputs is None else {"output": {}, "outputs": outputs}
        run = run_processor(kind, [name], settings=settings)
        assert run.outputs[name] == [{"n": 1}]
        return
    # Neither repeated nor given up: no record is at fault.
    with pytest.raises(SettingsError) as refused:
        run_processor(
            kind,
            ["output", name],
            settings={
                "output": {},
                "outputs": outputs,
                "on_error": {"retries": 3, "then": "skip"},
            },
        )
    assert words in str(refused.value)


def test_every_output_that_is_named_is_in_the_result_also_without_rows():
    run = run_processor(
        Sorted, ["output"], settings={"output": {}, "outputs": {"late": {}, "bad": {}}}
    )

    assert run.outputs == {"output": [{"n": 1}], "late": [], "bad": []}
    assert replay(
        Sorted,
        ["late"] * 2,
        settings={"output": {}, "outputs": {"late": {}}},
        faults=Faults(crash_after=1),
    ).outputs["late"]
    with pytest.raises(SettingsError):
        assert_idempotent(Sorted, ["late"], settings={"output": {}, "outputs": {"other": {}}})


def test_the_schema_of_an_output_that_is_not_named_is_refused():
    with (
        pytest.warns(DeprecationWarning, match="outputs|schema"),
        pytest.raises(SettingsError, match=r"schema: .*there is no outputs\.lat"),
    ):
        run_processor(Sorted, [], outputs=["late"], schema={"lat": "n long"})


@pytest.mark.parametrize("kind", [Sorted, SortedSingly])
def test_a_redrive_to_a_file_that_grows_keeps_the_letter_whose_row_has_no_output(kind):
    """There such rows were dropped, and the letter removed."""
    record = make_record("lat")
    letter = Letter.of(
        record,
        LetterSource("a", "p:P", "s", "shardId-0"),
        error="",
        raised_at="",
        traceback="",
        calls=1,
        given_up_at=0.0,
    )
    job = RedriveJob(
        processor="p:P",
        import_paths=(),
        application="a",
        stream="s",
        options={},
        retries=0,
        batch_max=10,
        uncheckpointed_max=100,
    )

    answer = redriven(job, kind, [letter], LetterRows((), user_process._opener(job)))

    assert (list(answer.done), list(answer.rows)) == ([], [])
    assert "there is no outputs.lat" in answer.error
