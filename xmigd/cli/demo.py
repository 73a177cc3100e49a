"""The demo, for those who have no GPU and a minute."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    app.command(
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
    )(demo)  # fmt: skip


def demo(context: typer.Context) -> None:
    """Train on this machine while its server is killed: what make demo does."""
    from xmigd.demo.main import run

    raise typer.Exit(run(context.args))
