"""`without_device_file.py PROGRAM ARGUMENTS...`: runs a JAX program where there is no GPU.

JAX looks for /dev/nvidia0 before it asks the driver. The null device has no file.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from jax._src import hardware_utils

hardware_utils.has_visible_nvidia_gpu = lambda: True
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
