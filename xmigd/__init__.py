"""xMIG's daemon and command line. What each part does: docs/architecture.md."""

__version__ = "0.1.0"
