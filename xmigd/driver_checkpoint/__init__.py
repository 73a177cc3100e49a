"""Moves of programs that were not started under xMIG, with the driver's own checkpoints (engine=driver).

`machine` decides and does no I/O; `helper` is the process that calls the driver, `link` talks to it; `node` knows the
GPUs; `plan` says what is refused and why; `engine` puts them together. See docs/driver-checkpoint.md.
"""
