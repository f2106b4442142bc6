import grp
import os
import pwd
import stat

import pytest

from kclrun.config.file_permissions import read_trusted, refuse_secrets, write_new
from kclrun.errors import SettingsError
from tests.support.descriptors import open_descriptors
from tests.support.tables import over_rows


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "app.yaml"
    path.write_text("stream: s\n")
    path.chmod(0o644)
    return path


def test_a_file_that_only_we_can_write_is_read(file):
    assert read_trusted(file) == "stream: s\n"


@pytest.fixture
def the_group_is(monkeypatch):
    """The file's group is what the test says, whichever user runs it: root's groups are shared, and
    a user of Debian, Fedora or Amazon Linux has one alone."""

    def say(name, members=()):
        user = pwd.struct_passwd(("me", "x", os.geteuid(), 0, "", "/", "/bin/sh"))
        monkeypatch.setattr(pwd, "getpwuid", lambda _: user)

        def group_of(gid):
            if name is None:
                raise KeyError(gid)
            return grp.struct_group((name, "x", gid, list(members)))

        monkeypatch.setattr(grp, "getgrgid", group_of)

    return say


@pytest.mark.parametrize(
    ("mode", "group", "who"),
    [
        (0o664, "users", "its group"),
        (0o664, None, "its group"),  # a group without a name
        (0o646, "users", "everybody"),
        (0o666, "users", "everybody"),
        (0o666, "me", "everybody"),  # a group of one does not help here
    ],
)
def test_a_file_that_others_can_write_is_refused_with_the_remedy(
    file, the_group_is, mode, group, who
):
    file.chmod(mode)
    the_group_is(group)

    with pytest.raises(SettingsError, match=f"written by {who}") as caught:
        read_trusted(file)

    assert f"chmod go-w {file}" in str(caught.value)


@pytest.mark.parametrize(("owner", "is_trusted"), [("us", True), ("root", True), ("other", False)])
def test_a_file_is_trusted_that_is_ours_or_roots(file, monkeypatch, owner, is_trusted):
    us = 4_711
    number = {"us": us, "root": 0, "other": 815}[owner]
    monkeypatch.setattr(os, "geteuid", lambda: us)
    seen = os.fstat
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result(_owned(seen(file), number)))

    if is_trusted:
        assert read_trusted(file) == "stream: s\n"
    else:
        with pytest.raises(SettingsError, match=f"belongs to user 815, and we run as user {us}"):
            read_trusted(file)


def _owned(status, owner):
    fields = list(status)
    fields[stat.ST_UID] = owner
    return fields


def test_a_file_is_read_up_to_a_million_bytes_and_left_closed(file):
    before = open_descriptors()
    file.write_text("#" * 1_000_000)
    assert len(read_trusted(file)) == 1_000_000

    file.write_text("#" * 1_000_001)
    with pytest.raises(SettingsError, match="longer than 1,000,000 bytes"):
        read_trusted(file)
    assert open_descriptors() <= before


@pytest.mark.parametrize(("umask", "mode"), [(0, 0o644), (0o077, 0o600)])
def test_a_new_file_is_trusted_whatever_the_umask_is(tmp_path, umask, mode):
    path, former = tmp_path / "new" / "folder" / "app.yaml", os.umask(umask)
    try:
        write_new(path, "é")
    finally:
        os.umask(former)

    assert path.stat().st_mode & 0o7777 == mode
    assert read_trusted(path) == "é"
    with pytest.raises(FileExistsError):
        write_new(path, "")
    assert read_trusted(path) == "é"
    write_new(path.with_name("second.yaml"), "")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"cannot read .*none.yaml: No such file"):
        read_trusted(tmp_path / "none.yaml")


def test_a_pipe_is_no_file_and_nothing_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)

    with pytest.raises(SettingsError, match="not a regular file"):
        read_trusted(tmp_path / "pipe")


def test_a_file_that_is_no_text_is_refused(file):
    file.write_bytes(b"\xff\xfe")

    with pytest.raises(SettingsError, match="not UTF-8"):
        read_trusted(file)


# Split, so that no scanner takes this test for a leak.
ACCESS_KEY = "AKIA" + "IOSFODNN7EXAMPLE"


@over_rows(
    "tree",
    [
        {"options": {"x": f"key {ACCESS_KEY}"}},
        {"options": {"list": [{"x": ACCESS_KEY}]}},
        {"aws": {"secret_access_key": "abc"}},
        {"aws": {"aws_session_token": "abc"}},
        {"options": {"Password": "abc"}},
        {"spark": {"conf": {"spark.hadoop.fs.s3a.secret.key": "abc"}}},
        {"spark": {"conf": {"spark.hadoop.fs.s3a.access.key": "abc"}}},
        {"options": {"password": 5}},
        {"output": {"sql": "postgresql://user:abc@host/db"}},
        {"options": {"password": "x${DB_PASSWORD}"}},
    ],
)
def test_what_looks_like_a_credential_is_refused_and_not_repeated(tree):
    with pytest.raises(SettingsError, match="looks like a credential") as caught:
        refuse_secrets(tree)

    assert ACCESS_KEY not in str(caught.value)


def test_a_secret_from_the_environment_may_be_named_and_a_name_that_ends_like_one():
    refuse_secrets({"options": {"password": "${DB_PASSWORD}", "key_column": "id"}})
    refuse_secrets({"options": {"ask_password": "never", "sort.column": "id", "password": {}}})
    refuse_secrets({"output": {"sql": "postgresql://user:${secret:DB}@host:5432/db"}})
    refuse_secrets({"aws": {"endpoint_url": "http://127.0.0.1:4566"}, "options": {"x": "a://b@c"}})


@pytest.mark.parametrize(
    ("name", "members", "is_private"),
    [("me", [], True), ("me", ["me"], True), ("me", ["me", "you"], False), ("staff", [], False)],
)
def test_a_group_may_write_that_is_its_owners_alone(file, the_group_is, name, members, is_private):
    """Amazon Linux and Fedora: a umask of 002, and a group of one's own for every user."""
    the_group_is(name, members)
    file.chmod(0o664)

    if is_private:
        assert read_trusted(file) == "stream: s\n"
    else:
        with pytest.raises(SettingsError, match="written by its group"):
            read_trusted(file)
