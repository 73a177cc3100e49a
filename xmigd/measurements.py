"""Measurement files: docs/measurements/<topic>.json, in one form, and what is shown of them beside it.

Whoever measures writes the file through `Measurements.write`, which renders <topic>.md (a table) and, if any figure
has a target, <topic>.svg (each figure against its target). `python -m xmigd.measurements` renders all of them again.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from datetime import UTC, date, datetime
from html import escape
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

FOLDER = Path("docs/measurements")
Line = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f|]+$")]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Row(BaseModel):
    """One figure. `target` is null where nothing was promised."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Line
    value: Number
    unit: Line
    target: Number | None = None
    better: Literal["lower", "higher"]
    conditions: Line

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


class Missing(BaseModel):
    """What should have been measured, and why it was not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Line
    why: Line


class Measurements(BaseModel):
    """What was measured about one topic, in one run, on one machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    topic: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}(\+changes)?$")]
    date: date
    machine: Line
    rows: Annotated[list[Row], Field(min_length=1)]
    missing: list[Missing] = []

    @model_validator(mode="after")
    def _names_differ(self) -> Measurements:
        if len({row.name for row in self.rows}) != len(self.rows):
            raise ValueError("two rows have the same name")
        return self

    @classmethod
    def here(cls, topic: str, rows: list[Row]) -> Measurements:
        """Measured now, on this machine, with the tree as it is."""
        today = datetime.now(UTC).date()
        return cls(topic=topic, commit=current_commit(), date=today, machine=describe_machine(), rows=rows)

    def write(self, folder: Path = FOLDER) -> Path:
        """Write the JSON and what is rendered from it; returns the JSON's path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.topic}.json"
        left_out = set() if self.missing else {"missing"}
        path.write_text(self.model_dump_json(indent=2, exclude=left_out) + "\n")
        self.render(folder)
        return path

    def render(self, folder: Path = FOLDER) -> None:
        plot = any(row.target for row in self.rows)
        if plot:
            (folder / f"{self.topic}.svg").write_text(self.svg())
        (folder / f"{self.topic}.md").write_text(self.markdown(plot))

    def markdown(self, plot: bool) -> str:
        lines = [
            f"# Measured: {self.topic}", "",
            f"{self.date.isoformat()}, commit {self.commit}, {self.machine}. Rendered from `{self.topic}.json`.", "",
            *([f"![each figure against its target]({self.topic}.svg)", ""] if plot else []),
            "| | measured | target | reached | conditions |", "|---|--:|--:|---|---|",
        ]  # fmt: skip
        for row in self.rows:
            sign = "≤" if row.better == "lower" else "≥"
            target = "" if row.target is None else f"{sign} {show(row.target)} {row.unit}"
            reached = {None: "", True: "yes", False: "**no**"}[row.reached]
            lines.append(f"| {row.name} | {show(row.value)} {row.unit} | {target} | {reached} | {row.conditions} |")
        if self.missing:
            lines += ["", "Not measured:", "", *(f"- {missing.name}: {missing.why}" for missing in self.missing)]
        return "\n".join(lines) + "\n"

    def svg(self) -> str:
        """A bar per figure that has a target, on a logarithmic scale from a tenth of the target to ten times it."""
        rows = [row for row in self.rows if row.target and row.value > 0]
        left, width, step, top = 330, 400, 30, 34
        middle, height = left + width // 2, top + step * len(rows) + 10
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 170} {height}" '
            'font-family="system-ui, sans-serif" font-size="13">',
            "<style>text{fill:#24292f}.n{fill:#57606a}.t{stroke:#57606a;stroke-dasharray:3 3}.y{fill:#2da44e}"
            ".x{fill:#cf222e}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.n{fill:#9198a1}"
            ".t{stroke:#9198a1}}</style>",
            f'<line class="t" x1="{middle}" x2="{middle}" y1="24" y2="{height - 6}"/>',
            f'<text class="n" x="{middle}" y="16" text-anchor="middle">target</text>',
        ]
        for i, row in enumerate(rows):
            assert row.target is not None
            y = top + i * step
            ratio = max(-1.0, min(1.0, math.log10(row.value / row.target)))
            length = width / 2 * (1 + ratio)
            kind = "y" if row.reached else "x"
            out.append(
                f'<text x="{left - 10}" y="{y + 14}" text-anchor="end">{escape(row.name)}</text>'
                f'<rect class="{kind}" x="{left}" y="{y}" width="{max(length, 2):.0f}" height="18" rx="2"/>'
                f'<text class="n" x="{left + width + 12}" y="{y + 14}">{show(row.value)} {escape(row.unit)}, '
                f"{row.better} is better</text>"
            )
        return "\n".join([*out, "</svg>"]) + "\n"


def show(value: float) -> str:
    """Three significant digits, with the thousands apart."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{round(value, 2 - math.floor(math.log10(abs(value)))):,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def current_commit() -> str:
    """The commit that is checked out; `+changes` if the tree differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")


def describe_machine() -> str:
    """Processor, cores, memory, kernel: what decides figures, and nothing that names the machine."""
    processor = platform.machine()
    with open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    kernel = ".".join(platform.release().split("-")[0].split(".")[:2])
    return f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {kernel}"


def read(path: Path) -> Measurements:
    """Raises ValueError with the reason when the file does not have the form."""
    try:
        measurements = Measurements.model_validate_json(path.read_text())
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if measurements.topic != path.stem:
        raise ValueError(f"{path}: its topic is {measurements.topic}")
    return measurements


def main() -> None:
    for path in sorted(FOLDER.glob("*.json")):
        try:
            read(path).render()
        except ValueError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
