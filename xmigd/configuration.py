"""How our programs come to their settings, and how they say what is wrong with them: built-in defaults, then the
program's file (TOML), then the environment."""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import sys
import tomllib
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, TomlConfigSettingsSource

from xmigd import __version__
from xmigd.errors import StartError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

EXIT_CANNOT_START = 1
EXIT_USAGE = 2


class Configuration(BaseSettings):
    """Every setting is also an environment variable: `env_prefix` and its name in capitals."""

    program: ClassVar[str]
    file: ClassVar[str]
    file_variable: ClassVar[str]  # names another one

    @classmethod
    def variable(cls, setting: str) -> str:
        return f"{cls.model_config['env_prefix']}{setting.upper()}"

    @classmethod
    def path(cls) -> str:
        """The file that is read. It has to be there if somebody named it: without what it says, another node starts."""
        return os.environ.get(cls.file_variable) or cls.file

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = cls.path()
        if os.environ.get(cls.file_variable) and not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, "there is no such file", path)
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path)


def what_is_wrong(settings: type[Configuration], error: ErrorDetails) -> tuple[str, str]:
    """What a validation has found, for people: which setting it is about, and what is wrong with it."""
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, settings.model_fields, 1)
        return f"{settings.path()} has {name}", "there is no such setting" + (f"; is it {near[0]}?" if near else "")
    where = f"setting {name} ({settings.variable(name)})" if name else "settings"
    return where, error["msg"].removeprefix("Value error, ")


Settings = TypeVar("Settings", bound=Configuration)


def from_command_line(settings: type[Settings], description: str) -> Settings:
    """What `--config`, the file and the environment say. Ends the program where that cannot be used."""
    program, variable = settings.program, settings.file_variable
    prefix = settings.model_config["env_prefix"]
    parser = argparse.ArgumentParser(prog=program, description=f"{description}; settings: {prefix}* or a TOML file")
    parser.add_argument("--config", metavar="FILE", help=f"settings file (default: {settings.file} if it exists)")
    parser.add_argument("--version", action="version", version=f"{program} {__version__}")
    options = parser.parse_args()
    if options.config:
        os.environ[variable] = options.config
    path = settings.path()
    try:
        return settings()
    except ValidationError as error:
        _end(program, EXIT_USAGE, *(": ".join(what_is_wrong(settings, each)) for each in error.errors()))
    except FileNotFoundError:
        _end(program, EXIT_USAGE, f"there is no settings file {path}")
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        _end(program, EXIT_USAGE, f"the settings file {path} cannot be read: {error}")


def run(program: str, work: Callable[[], None]) -> None:
    """Do it, and say why where it cannot start."""
    try:
        work()
    except StartError as error:
        _end(program, EXIT_CANNOT_START, str(error))


def _end(program: str, code: int, *lines: str) -> NoReturn:
    for line in lines:
        print(f"{program}: {line}", file=sys.stderr)
    sys.exit(code)
