"""`xmigctl`, the command line: one module per resource, put together in `app`."""

from xmigd.cli.app import app, main

__all__ = ["app", "main"]
