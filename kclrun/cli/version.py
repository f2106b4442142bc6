"""`kclrun version`: the versions of kclrun and of its main dependencies."""

from __future__ import annotations

import click

from kclrun.cli.messages import echo, versions


@click.command()
def version() -> None:
    """Show the versions of kclrun and of its main dependencies."""
    echo(versions())
