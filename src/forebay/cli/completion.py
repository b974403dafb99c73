"""``forebay completion``: the script by which a shell completes the command's words."""

from __future__ import annotations

from forebay.extras import Needs

with Needs("cli", __name__):
    import click
    from click.shell_completion import get_completion_class

from forebay.cli.printing import refusals

__all__ = ["command"]


@click.command("completion", short_help="Print a script for a shell's completion.")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes subcommands and options in a SHELL.

    For bash 4.4 or later put this line into ~/.bashrc:

        eval "$(forebay completion bash)"

    For zsh the same with zsh into ~/.zshrc. For fish: forebay completion fish > ~/.config/fish/completions/forebay.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root().command
    with refusals():
        print(kind(root, {}, "forebay", "_FOREBAY_COMPLETE").source())
