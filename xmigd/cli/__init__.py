"""`xmigctl`, the command line: one module per resource, put together in `app`."""

from xmigd.cli.app import main, make_app

__all__ = ["main", "make_app"]
