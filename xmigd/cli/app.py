"""The commands, put together; the options that come before a command; what an error ends with."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated

import typer

from xmigd import __version__
from xmigd.cli import quick
from xmigd.cli.common import read_token
from xmigd.cli.exits import Exit, exit_code_of
from xmigd.cli.invocation import COMPLETION, Invocation, invocation
from xmigd.cli.output import show_error
from xmigd.errors import XmigError

# The modules in the order of the help, each with the commands that it registers.
MODULES = {
    "jobs": ("run", "ps", "stop", "job"), "ranks": ("ranks",), "logs": ("logs",),
    "moves": ("migrate", "migrations", "suspend", "resume", "drain"), "checkpoints": ("checkpoint", "restore"),
    "transfers": ("transfer",),
    "scheduling": ("preempt", "continue", "bulk"),
    "consolidate": ("consolidate",), "fleet": ("fleet",),
    "movable": ("check-movable",), "predict": ("predict", "scaling"), "sharing": ("sharing",),
    "profiling": ("profile", "trace"),
    "devices": ("device",), "faults": ("fault", "recoveries"), "operations": ("op",), "events": ("events",),
    "policies": ("policy", "breaker"), "audit": ("audit",), "tokens": ("token",), "peers": ("peer",),
    "webhooks": ("webhook",), "slurm": ("slurm",),
    "doctor": ("doctor",), "demo": ("demo",), "completion": ("completion",),
}  # fmt: skip
TAKE_A_VALUE = ("--url", "--token", "--ca-file", "--client-cert")


def _version(value: bool) -> None:
    if value:
        print(f"xmigctl {__version__}")
        raise typer.Exit


def xmigctl(
    url: Annotated[
        str | None,
        typer.Option("--url", envvar="XMIG_URL", metavar="URL", help="a daemon on the network; default: the local one"),
    ] = None,
    token: Annotated[
        str | None, typer.Option("--token", metavar="TOKEN|@FILE", help="for --url; also XMIG_TOKEN")
    ] = None,
    ca_file: Annotated[
        str | None, typer.Option("--ca-file", envvar="XMIG_CA_FILE", metavar="FILE", help="who signs its certificate")
    ] = None,
    client_cert: Annotated[
        str | None,
        typer.Option(
            "--client-cert", envvar="XMIG_CLIENT_CERT", metavar="FILE", help="if it asks for one: with its key"
        ),
    ] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Run, watch and move GPU programs under xMIG."""
    requested = invocation.get()
    requested.url, requested.token = url, read_token(token)
    requested.ca_file, requested.client_cert = ca_file, client_cert


def make_app(modules: Iterable[str] = MODULES) -> typer.Typer:
    """The commands of these modules. Who asks for one command does not wait for the others to be loaded."""
    quick.install()
    app = typer.Typer(
        name="xmigctl", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: docs/reference-cli.md. Settings of the daemon, and where it is: XMIG_* (docs/settings.md).",
    )  # fmt: skip
    app.callback()(xmigctl)
    for name in modules:
        import_module(f"xmigd.cli.{name}").register(app)
    return app


def _needed(arguments: Sequence[str]) -> Iterable[str]:
    """The module of the command that is meant; all of them for the help, for completion and for what is misspelt."""
    words = iter(arguments)
    for word in words:
        if word in TAKE_A_VALUE:
            next(words, None)
        elif word in ("-h", "--help"):
            break
        elif not word.startswith("-"):
            return [name for name, commands in MODULES.items() if word in commands] or MODULES
    return MODULES


def main(arguments: list[str] | None = None) -> None:
    """The program. Ends by SystemExit with a code of `exits.Exit`."""
    requested = Invocation()
    invocation.set(requested)
    try:
        if COMPLETION in os.environ:
            from typer.completion import completion_init  # type: ignore[attr-defined]

            completion_init()
        # Its name is the same however it was started: completion depends on it.
        app = make_app(
            MODULES if COMPLETION in os.environ else _needed(sys.argv[1:] if arguments is None else arguments)
        )
        app(arguments, prog_name="xmigctl", complete_var=COMPLETION)
    except XmigError as error:
        show_error(error, requested.output)
        sys.exit(exit_code_of(error))
    except BrokenPipeError:
        # Whoever read this has seen enough; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.OK)
    finally:
        requested.to_close.close()
