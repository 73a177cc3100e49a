"""Runs programs in processes, natively or under a daemon, and compares what they read with what they mean."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.differential.interpreter import interpret
from tests.differential.program import Program
from xmigd.demo.node import Node
from xmigd.demo.node import Program as Job
from xmigd.native import ROOT

HERE = Path(__file__).parent
RUNNER = HERE / "runner.py"
PATIENCE = 60.0  # seconds for one program, which takes milliseconds
