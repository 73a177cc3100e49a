"""The commands, put together; the options that come before a command; what an error ends with."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]

from xmigd import __version__
from xmigd.cli import (
    audit,
    completion,
    demo,
    devices,
    doctor,
    events,
    faults,
    jobs,
    moves,
    operations,
    policies,
    tokens,
)
from xmigd.cli.common import read_token
from xmigd.cli.completion import COMPLETION
from xmigd.cli.exits import Exit, exit_code_of
from xmigd.cli.invocation import Invocation, invocation
from xmigd.cli.output import show_error
from xmigd.errors import XmigError

app = typer.Typer(
    name="xmigctl", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: docs/reference-cli.md. Settings of the daemon, and where it is: XMIG_* (docs/settings.md).",
)  # fmt: skip


def _version(value: bool) -> None:
    if value:
        print(f"xmigctl {__version__}")
        raise typer.Exit


@app.callback()
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
    asked = invocation.get()
    asked.url, asked.token = url, read_token(token)
    asked.ca_file, asked.client_cert = ca_file, client_cert


for module in (jobs, moves, devices, faults, operations, events, policies, audit, tokens, doctor, demo, completion):
    module.register(app)


def main(arguments: list[str] | None = None) -> None:
    """The program. Ends by SystemExit with a code of `exits.Exit`."""
    asked = Invocation()
    invocation.set(asked)
    try:
        if COMPLETION in os.environ:
            completion_init()
        # Its name is the same however it was started: completion depends on it.
        app(arguments, prog_name="xmigctl", complete_var=COMPLETION)
    except XmigError as error:
        show_error(error, asked.output)
        sys.exit(exit_code_of(error))
    except BrokenPipeError:
        # Whoever read this has seen enough; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.OK)
    finally:
        asked.to_close.close()
