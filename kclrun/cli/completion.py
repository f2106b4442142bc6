"""`kclrun completion`: prints the script with which a shell completes verbs, options and files.

click makes the script; at each Tab the shell runs `kclrun` with a variable that asks for words.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kclrun.cli import exit_codes

_NAME = "kclrun"
# The one that `click.Command.main` looks for.
_VARIABLE = "_KCLRUN_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> int:
    """Print the completion of commands for your shell.

    \b
    kclrun completion bash > ~/.local/share/bash-completion/completions/kclrun
    kclrun completion zsh > "${fpath[1]}/_kclrun"
    kclrun completion fish > ~/.config/fish/completions/kclrun.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows the three"
    click.echo(kind(ctx.find_root().command, {}, _NAME, _VARIABLE).source())
    return exit_codes.DRAINED
