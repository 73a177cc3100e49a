"""docs/reference-cli.md: every command with its options."""

from __future__ import annotations

from enum import Enum
from typing import Any

from typer.main import get_command

from tests.docs.markdown import MADE, table
from xmigd.cli import make_app
from xmigd.cli.exits import MEANINGS


def page() -> str:
    root: Any = get_command(make_app())
    parts = [_command(name, command) for name, command in commands(root)]
    codes = table(("code", "meaning"), ((int(code), meaning) for code, meaning in MEANINGS.items()))
    return (
        f"""{MADE}
# The command line

`xmigctl [OPTIONS] COMMAND ...`: {root.help} Every command prints a table, or with `-o json` what the daemon
answered. Completion for a shell: `source <(xmigctl completion bash)`.

## Before the command

{_parameters(root)}
## Exit codes

{codes}
## Commands

{"".join(parts)}""".rstrip()
        + "\n"
    )


def commands(group: Any, before: str = "") -> list[tuple[str, Any]]:
    """Every command with its full name, in the order of the help."""
    found = []
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found += commands(command, f"{before}{name} ")
        elif not command.hidden:
            found.append((before + name, command))
    return found


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    shown = "".join(f" {_argument(p)}" for p in arguments)
    usage = f"xmigctl {name} [OPTIONS]{' --' if name == 'run' else ''}{shown}"
    return f"### xmigctl {name}\n\n`{usage}`\n\n{command.help}\n\n{_parameters(command)}\n"


def _argument(parameter: Any) -> str:
    name = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _parameters(command: Any) -> str:
    rows = [(_names(p), _help(p)) for p in command.params if not p.hidden and p.name != "help"]
    return table(("option", "what"), rows) if rows else ""


def _names(parameter: Any) -> str:
    if not parameter.opts[0].startswith("-"):
        return f"`{_argument(parameter)}`"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if getattr(parameter, "is_flag", False):
        return names
    annotation = parameter.type_descriptor.annotation
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"{names} {'/'.join(str(choice.value) for choice in annotation)}"
    kinds = {int: "N", float: "N", str: "TEXT"}
    return f"{names} {parameter.metavar or kinds.get(annotation, 'TEXT')}"


def _help(parameter: Any) -> str:
    text = parameter.help or {"version": "the version"}.get(parameter.name, "")
    default = parameter.default
    if isinstance(default, Enum):
        default = default.value
    if (
        isinstance(default, (str, int, float))
        and default != ""
        and not isinstance(default, bool)
        and parameter.show_default
    ):
        text += f" (default {default})"
    elif default is True and parameter.secondary_opts:
        text += f" (default {parameter.opts[0]})"
    return text + (f" [{parameter.envvar}]" if parameter.envvar else "")
