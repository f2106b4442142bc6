"""The token of `page --actions`: where it comes from, and what is refused."""

import os

import pytest

from kclrun.cli.page.command import page_token
from kclrun.errors import SettingsError

TOKEN = "0123456789abcdef"


def test_the_token_comes_from_the_environment_and_does_not_stay_there(monkeypatch):
    monkeypatch.setenv("KCLRUN_PAGE_TOKEN", TOKEN)

    assert page_token(None, "127.0.0.1") == TOKEN
    assert "KCLRUN_PAGE_TOKEN" not in os.environ


def test_the_token_comes_from_a_file_that_only_we_can_read(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)

    assert page_token(file, "localhost") == TOKEN


@pytest.mark.parametrize(
    ("text", "mode", "listen", "words"),
    [
        (None, 0o600, "127.0.0.1", "KCLRUN_PAGE_TOKEN holds no token"),
        (TOKEN[1:], 0o600, "127.0.0.1", "holds a short token"),
        (TOKEN, 0o640, "127.0.0.1", "chmod 600"),
        (TOKEN, 0o604, "127.0.0.1", "chmod 600"),
        (TOKEN, 0o600, "0.0.0.0", "clear text"),
        (TOKEN, 0o600, "10.0.0.7", "ssh -L 8080:127.0.0.1:8080"),
    ],
)
def test_what_would_make_the_token_known_is_refused_without_showing_it(
    tmp_path, monkeypatch, text, mode, listen, words
):
    monkeypatch.delenv("KCLRUN_PAGE_TOKEN", raising=False)
    file = tmp_path / "token" if text is not None else None
    if file is not None:
        file.write_text(text)
        file.chmod(mode)

    with pytest.raises(SettingsError) as refused:
        page_token(file, listen)

    assert words in str(refused.value)
    assert text is None or text not in str(refused.value)


def test_a_token_file_that_is_missing_is_named_without_advice_for_secrets_of_settings(tmp_path):
    with pytest.raises(SettingsError) as refused:
        page_token(tmp_path / "token", "127.0.0.1")

    assert (
        str(refused.value) == f"cannot read the secret {tmp_path}/token: No such file or directory"
    )
