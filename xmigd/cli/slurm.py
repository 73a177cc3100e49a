"""What Slurm starts: the command before each task, prolog and epilog, the health check. docs/slurm.md has the whole."""

from __future__ import annotations

from typing import Annotated

import typer

group = typer.Typer(no_args_is_help=True, help="What Slurm starts on a node; nobody needs these by hand.")


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="slurm")


@group.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def task(command: Annotated[list[str], typer.Argument(help="the task's command and its arguments")]) -> None:
    """Run a task of a Slurm job under xMIG, or let it go on from its last checkpoint if the job was requeued."""
    from xmigd.cli.slurm_task import run

    run(command)


@group.command()
def prolog() -> None:
    """Before a job with --xmig: fail on a node that is not healthy; take jobs that Slurm has suspended off its
    devices."""
    from xmigd.cli.slurm_node import before_job

    before_job()


@group.command()
def epilog() -> None:
    """After a job with --xmig: end what is left of it; remove its checkpoints, unless it is requeued."""
    from xmigd.cli.slurm_node import after_job

    after_job()


@group.command()
def health() -> None:
    """Drain and resume Slurm's node as xMIG's devices are; drain a device that a node's reason names: xmig-drain
    cuda:0."""
    from xmigd.cli.slurm_node import check_health

    check_health()
