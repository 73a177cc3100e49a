"""Completion of commands and options in a shell; packages install these scripts."""

from __future__ import annotations

from enum import StrEnum

import typer

from xmigd.cli.invocation import COMPLETION


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def register(app: typer.Typer) -> None:
    app.command()(completion)


def completion(shell: Shell) -> None:
    """Print the completion script for a shell: source <(xmigctl completion bash)."""
    print(script(shell), end="")


def script(shell: Shell) -> str:
    """It asks xmigctl itself, so it never is out of date."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    return f"{get_completion_script(prog_name='xmigctl', complete_var=COMPLETION, shell=shell.value)}\n"
