"""Rolls where their places differ: objects of several parts, and files that are linked."""

import os

import pytest

from kclrun.aws.outputs.s3 import PART_BYTES
from kclrun.errors import ServiceError, SettingsError, SinkError, Superseded
from tests.contract.output_places import Files, Objects, Parts
from tests.contract.test_outputs import OF, START, at, begun, emit, numbers, owner


@pytest.fixture
def parts(aws, tmp_path):
    place = Parts(aws, tmp_path)
    yield place
    place.close()


@pytest.fixture
def objects(aws, tmp_path):
    place = Objects(aws, tmp_path)
    yield place
    place.close()


@pytest.fixture
def files(tmp_path):
    place = Files(None, tmp_path)
    yield place
    place.close()


def test_parts_leave_as_they_fill_and_only_the_last_request_creates_the_object(parts):
    output = begun(parts, OF)
    emit(output, 1, 4)
    unsent = output.unsent_bytes
    emit(output, 5, 5)
    assert unsent > 2 * PART_BYTES > PART_BYTES >= output.unsent_bytes
    assert parts.rows() == []
    assert output.commit() == at(5)
    (key,) = [key for key in parts.names() if "/_kclrun/" not in key]
    assert key.endswith(
        "/orders/clicks/20231114T221320Z/shardId-000000000007/0/0-TRIM_HORIZON.jsonl"
    )
    assert numbers(parts) == [1, 2, 3, 4, 5]


def test_rows_are_not_taken_while_a_full_part_cannot_be_sent(parts):
    output = begun(parts, OF)
    emit(output, 1, 4)
    parts.faulty.watch("upload_part")
    parts.fail("throttled")
    with pytest.raises(SinkError, match="upload part 1"):
        emit(output, 5, 6)
    emit(output, 5, 6)
    output.commit()
    assert numbers(parts) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "request_name",
    ["upload_part", "create_multipart_upload", "put_object", "complete_multipart_upload"],
)
def test_a_proxys_page_with_status_200_is_not_a_part_a_record_or_an_object(parts, request_name):
    output = begun(parts, OF)
    emit(output, 1, 4)
    parts.faulty.watch(request_name)
    parts.fail("a proxy's page")
    with pytest.raises(SinkError, match="a proxy sent it"):
        output.commit()
    assert parts.rows() == []
    assert output.commit() == at(4)
    assert numbers(parts) == [1, 2, 3, 4]


def test_a_proxys_page_with_status_200_is_not_an_object_that_another_program_made(objects):
    emit(first := begun(objects, OF), 1, 2)
    first.commit()
    objects.faulty.watch("head_object")
    after = objects.open(owner(11))
    objects.fail("a proxy's page")
    with pytest.raises(SinkError, match="look for"):
        after.begin(START)
    assert after.begin(START) == at(2)


def test_an_upload_whose_parts_are_gone_begins_again_from_the_row(parts):
    output = begun(parts, OF)
    emit(output, 1, 4)
    emit(output, 5, 5)
    for upload in parts.s3.list_multipart_uploads(Bucket=parts.name)["Uploads"]:
        parts.s3.abort_multipart_upload(
            Bucket=parts.name, Key=upload["Key"], UploadId=upload["UploadId"]
        )
    with pytest.raises((Superseded, SinkError)):
        output.commit()
    after = begun(parts, owner(11))
    emit(after, 1, 5)
    after.commit()
    assert numbers(parts) == [1, 2, 3, 4, 5]


def test_a_service_that_ignores_the_condition_is_refused_in_words(objects):
    put = objects.faulty.put_object
    objects.s3.put_object = lambda IfNoneMatch=None, **more: put(**more)  # noqa: N803
    with pytest.raises(SettingsError, match="does not honour If-None-Match"):
        objects.open(OF).check()


def test_without_the_permission_to_list_the_check_says_which_one_is_missing(objects):
    objects.faulty.watch("head_object")
    output = objects.open(OF)
    output.check()
    objects.fail("refused")
    with pytest.raises(ServiceError, match="s3:ListBucket"):
        output.check()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"Metadata": {"kclrun-end": "1"}},
        {"Metadata": {"kclrun-end": "1", "kclrun-commit": "c", "kclrun-token": "none"}},
    ],
)
def test_an_object_that_is_not_ours_under_the_name_of_a_roll_is_an_error_in_words(objects, more):
    output = objects.open(OF)
    output.begin(START)
    emit(output, 1, 1)
    key = output._rolls.key(START)
    objects.s3.put_object(Bucket=objects.name, Key=key, Body=b"mine", **more)
    with pytest.raises(SettingsError, match="is not an object of kclrun"):
        output.commit()
    assert objects.s3.get_object(Bucket=objects.name, Key=key)["Body"].read() == b"mine"


def test_a_large_object_without_its_record_is_an_error_in_words(parts):
    output = begun(parts, OF)
    emit(output, 1, 4)
    output.commit()
    (record,) = [key for key in parts.names() if "/_kclrun/" in key]
    parts.s3.delete_object(Bucket=parts.name, Key=record)
    with pytest.raises(SettingsError, match="is gone"):
        begun(parts, owner(11))


def dies_at(files, link, monkeypatch):
    """An owner with rows 1..3 that ends at its first or second link(), without an answer."""
    output = begun(files, OF)
    emit(output, 1, 3)
    links = []
    real = os.link

    def dying(*arguments, **more):
        links.append(arguments)
        if len(links) == link:
            raise OSError(5, "the host is gone")
        return real(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", dying)
        with pytest.raises(SinkError):
            output.commit()
    return output


@pytest.mark.parametrize("closes", [False, True])
def test_rows_whose_record_has_its_name_are_published_by_the_next_owner(files, monkeypatch, closes):
    former = dies_at(files, 2, monkeypatch)
    if closes:
        former.close()
    assert files.rows() == []
    assert files.open(owner(11)).begin(START) == at(3)
    assert numbers(files) == [1, 2, 3]
    if not closes:
        assert former.commit() == at(3)
    assert files.open(owner(12)).begin(START) == at(3)
    assert numbers(files) == [1, 2, 3]


def test_a_roll_that_lost_leaves_nothing_and_one_that_won_only_rows_and_record(files, monkeypatch):
    former = dies_at(files, 1, monkeypatch)
    after = begun(files, owner(11))
    emit(after, 1, 2)
    assert after.commit() == at(2)
    with pytest.raises(Superseded):
        former.commit()
    names = [path.name for path in (files.folder / "rows").rglob("*") if path.is_file()]
    assert sorted(names) == [".0-TRIM_HORIZON.end", "0-TRIM_HORIZON.jsonl"]
    assert numbers(files) == [1, 2]


def test_a_file_that_its_reader_removed_does_not_come_back(files):
    output = begun(files, OF)
    emit(output, 1, 3)
    output.commit()
    for path in (files.folder / "rows").rglob("[!.]*.jsonl"):
        path.unlink()
    assert files.open(owner(11)).begin(START) == at(3)
    assert files.rows() == []


def test_a_full_disk_is_a_failure_that_is_repeated(files, monkeypatch):
    output = begun(files, OF)
    emit(output, 1, 3)
    real = os.pwrite

    def full(descriptor, data, offset):
        real(descriptor, data[:1], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(SinkError, match="ENOSPC"):
            output.commit()
    assert output.commit() == at(3)
    assert numbers(files) == [1, 2, 3]
