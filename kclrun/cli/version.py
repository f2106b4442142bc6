"""`kclrun version`: the versions of kclrun and of its main dependencies."""

from __future__ import annotations

from importlib import metadata

import click

from kclrun.cli.messages import echo


def versions() -> str:
    """One line with the versions for a bug report."""
    named = ("kclrun", "boto3", "msgspec", "protobuf")
    return ", ".join(f"{name} {_version(name)}" for name in named)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


@click.command()
def version() -> None:
    """Show the versions of kclrun and of its main dependencies."""
    echo(versions())
