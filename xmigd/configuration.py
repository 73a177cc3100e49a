"""How our programs come to their settings, and how they say what is wrong with them: built-in defaults, then the
program's file (TOML), then the environment."""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Callable
from typing import ClassVar, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, TomlConfigSettingsSource

from xmigd import __version__
from xmigd.errors import StartError

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
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = os.environ.get(cls.file_variable, cls.file)
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path)


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
        if not os.path.exists(options.config):
            _end(program, EXIT_USAGE, f"there is no settings file {options.config}")
        os.environ[variable] = options.config
    try:
        return settings()
    except ValidationError as error:
        _end(program, EXIT_USAGE, *(_what_is_wrong(settings, each["loc"], each["msg"]) for each in error.errors()))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        path = os.environ.get(variable, settings.file)
        _end(program, EXIT_USAGE, f"the settings file {path} cannot be read: {error}")


def _what_is_wrong(settings: type[Configuration], place: tuple[int | str, ...], reported: str) -> str:
    name = ".".join(str(part) for part in place)
    where = f"setting {name} ({settings.variable(name)})" if name else "settings"
    return f"{where}: {reported.removeprefix('Value error, ')}"


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
