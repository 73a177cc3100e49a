"""Entry of the daemon: `xmigd [--config FILE]`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from pydantic import ValidationError

from xmigd import __version__, log
from xmigd.errors import StartError
from xmigd.settings import Settings

EXIT_CANNOT_START = 1
EXIT_USAGE = 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="xmigd", description="xMIG's node daemon; settings: XMIG_* or a TOML file")
    parser.add_argument("--config", metavar="FILE", help="settings file (default: /etc/xmig/xmigd.toml if it exists)")
    parser.add_argument("--version", action="version", version=f"xmigd {__version__}")
    options = parser.parse_args()
    if options.config:
        if not os.path.exists(options.config):
            parser.exit(EXIT_USAGE, f"xmigd: there is no settings file {options.config}\n")
        os.environ["XMIG_CONFIG"] = options.config
    try:
        settings = Settings()
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            name = ".".join(str(part) for part in problem["loc"])
            print(f"xmigd: setting {name}: {problem['msg']} (XMIG_{name.upper()})", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    log.configure(settings.log_level, json=settings.log_json)
    from xmigd.daemon import serve

    try:
        asyncio.run(serve(settings))
    except StartError as error:
        print(f"xmigd: {error}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_START)


if __name__ == "__main__":
    main()
