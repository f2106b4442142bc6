"""`kclrun version`: ours, and those of what we stand on."""

from __future__ import annotations

from importlib import metadata

import click

__all__ = ["version", "versions"]


def versions() -> str:
    """One line with the versions that matter in a report."""
    named = ("kclrun", "boto3", "msgspec", "protobuf")
    return ", ".join(f"{name} {_version(name)}" for name in named)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


@click.command()
def version() -> None:
    """Show the versions of kclrun and of what it stands on."""
    click.echo(versions())
