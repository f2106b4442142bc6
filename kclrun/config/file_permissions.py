"""A configuration file is code: which users may have written it, and which secrets it must not
hold.

The file names code that is imported and run, so a user that can write it can run code as us [S4].
Credentials belong to the provider chain, never into a file [S11].
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from pathlib import Path
from typing import Any, Final, Literal

from kclrun.config import yaml_reader
from kclrun.config.yaml_reader import dotted
from kclrun.errors import SettingsError

_ACCESS_KEY: Final = re.compile(r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])")
_SECRET_NAMES: Final = frozenset(
    {"accesskeyid", "secretaccesskey", "secretkey", "sessiontoken", "password"}
)
# `name:password@` in an URL, unless it is a variable's.
_PASSWORD: Final = re.compile(r"://[^/@\s:]*:(?!\$\{)[^/@\s]+@")
_SECRET_ENDINGS: Final = (*sorted(_SECRET_NAMES), "accesskey")
_ROOT: Final = 0
_SECRET_BYTES_MAX: Final = 2**16
# Not writable by others [S4], with any umask.
_NEW_MODE: Final = 0o644


def read_trusted(path: Path, encoding: Literal["utf-8", "latin-1"] = "utf-8") -> str:
    """The text of a file that only we or root can have written.

    Checked on the open descriptor, so that the file read is the file checked.
    Raises: SettingsError.
    """
    try:
        # Non-blocking: a FIFO would otherwise wait for a writer before it can be refused.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    try:
        _refuse_other_writers(path, os.fstat(descriptor))
        # A file object can be made of a regular file only: for a folder Python raises.
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(yaml_reader.TEXT_BYTES_MAX + 1)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(content) > yaml_reader.TEXT_BYTES_MAX:
        raise SettingsError(f"{path} is longer than {yaml_reader.TEXT_BYTES_MAX:,} bytes")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 (byte {error.start})") from None


def read_secret(path: Path) -> str:
    """The text of a file without its last line end. Raises: SettingsError, which names the file and
    shows nothing of it."""
    try:
        with path.open("rb") as file:
            content = file.read(_SECRET_BYTES_MAX + 1)
        text = content.decode()
    except OSError as error:
        raise SettingsError(f"cannot read the secret {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"the secret {path} is not UTF-8") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text or len(content) > _SECRET_BYTES_MAX:
        raise SettingsError(f"the secret {path} is {'too long' if text else 'empty'}")
    return text


def write_new(path: Path, text: str) -> None:
    """Write a file that passes `read_trusted`, and create its parent folders; never over a file.

    Raises: OSError, also if the file exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Exclusive: a file that was created since the caller's check is not overwritten either.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _NEW_MODE)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _refuse_other_writers(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise SettingsError(f"{path} is a folder\nName the file in it:  --config {path}/app.yaml")
    if not stat.S_ISREG(status.st_mode):
        raise SettingsError(f"{path} is not a regular file")
    if status.st_uid not in {os.geteuid(), _ROOT}:
        raise SettingsError(
            f"{path} belongs to user {status.st_uid}, and we run as user {os.geteuid()}\n"
            "A configuration file names code to run, so it must be ours or root's\n"
            f"To go on:  sudo chown {os.geteuid()} {path}"
        )
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others == stat.S_IWGRP and _is_private_group(status):
        return
    if others:
        who = "everybody" if others & stat.S_IWOTH else "its group"
        raise SettingsError(
            f"{path} can be written by {who} (mode {stat.S_IMODE(status.st_mode):04o})\n"
            "A configuration file names code to run, so only its owner may write it\n"
            f"To go on:  chmod go-w {path}"
        )


def _is_private_group(status: os.stat_result) -> bool:
    """Whether the file's group is its owner's alone. Fedora, RHEL and Amazon Linux give every user
    such a group, with a umask of 002, so that a fresh clone is writable by it."""
    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return group.gr_name == owner.pw_name and set(group.gr_mem) <= {owner.pw_name}


def refuse_secrets(value: Any, path: yaml_reader.Path = ()) -> None:
    """Refuse values that look like AWS credentials, at any place. Raises: SettingsError."""
    if isinstance(value, dict):
        for key, item in value.items():
            if _names_a_secret(str(key)) and not _comes_from_outside(item):
                raise _secret((*path, str(key)))
            refuse_secrets(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            refuse_secrets(item, (*path, index))
    elif isinstance(value, str) and (
        _ACCESS_KEY.search(value) or (path[-1:] == ("sql",) and _PASSWORD.search(value))
    ):
        raise _secret(path)


def _names_a_secret(key: str) -> bool:
    letters = re.sub(r"[^a-z]", "", key.lower()).removeprefix("aws")
    # Spark's and Hadoop's settings have long names: spark.hadoop.fs.s3a.secret.key.
    return letters in _SECRET_NAMES or ("." in key and letters.endswith(_SECRET_ENDINGS))


def _comes_from_outside(item: Any) -> bool:
    return not isinstance(item, str | int) or (isinstance(item, str) and item.startswith("${"))


def _secret(path: yaml_reader.Path) -> SettingsError:
    return SettingsError(
        f"{dotted(path)}: looks like a credential, and credentials do not belong into a file\n"
        "AWS keys come from the provider chain: environment, profile, instance or container role;\n"
        "another secret is written as ${secret:NAME}, a file in /run/secrets, or as ${NAME} and set"
        " in the environment"
    )
