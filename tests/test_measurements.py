from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from xmigd import measurements
from xmigd.measurements import Measurements, Row, show

ROOT = Path(__file__).parent.parent
GOOD = {
    "topic": "journal", "commit": "0123456789ab", "date": "2026-01-31", "machine": "a CPU, 2 cores",
    "rows": [
        {"name": "round trip", "value": 4.2, "unit": "µs", "target": 5, "better": "lower", "conditions": "awake"},
        {"name": "records", "value": 1e6, "unit": "1/s", "target": 4e6, "better": "higher", "conditions": "null"},
        {"name": "size", "value": 12, "unit": "MiB", "target": None, "better": "lower", "conditions": "a job"},
    ],
}  # fmt: skip


def test_every_file_has_the_form_and_is_rendered() -> None:
    for path in (ROOT / measurements.FOLDER).glob("*.json"):
        found = measurements.read(path)
        plot = any(row.target for row in found.rows)
        assert path.with_suffix(".md").read_text() == found.markdown(plot)
        assert not plot or path.with_suffix(".svg").read_text() == found.svg()


def test_what_is_missing_is_written_read_and_shown(tmp_path: Path) -> None:
    missing = [{"name": "kills", "why": "under xMIG: exit code 1"}, {"name": "jax", "why": "no time was left for it"}]
    written = Measurements.model_validate(GOOD | {"missing": missing})
    path = written.write(tmp_path)
    assert json.loads(path.read_text()) == GOOD | {"missing": missing}
    assert measurements.read(path) == written
    shown = (tmp_path / "journal.md").read_text()
    assert shown.endswith("\nNot measured:\n\n- kills: under xMIG: exit code 1\n- jax: no time was left for it\n")
    # Nothing missing: not a word about it.
    whole = Measurements.model_validate(GOOD).write(tmp_path)
    assert "missing" not in json.loads(whole.read_text())
    assert "Not measured" not in (tmp_path / "journal.md").read_text()


@pytest.mark.parametrize(
    "missing", [{"name": "kills"}, {"name": "", "why": "x"}, {"name": "a", "why": "b\nc"}, {"name": "a|b", "why": "x"}]
)
def test_a_missing_part_has_a_name_and_a_line(missing: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="missing"):
        Measurements.model_validate(GOOD | {"missing": [missing]})


def test_written_and_read(tmp_path: Path) -> None:
    written = Measurements.model_validate(GOOD)
    path = written.write(tmp_path)
    assert json.loads(path.read_text()) == GOOD
    assert measurements.read(path) == written
    table = (tmp_path / "journal.md").read_text()
    assert "| round trip | 4.2 µs | ≤ 5 µs | yes | awake |" in table
    assert "| records | 1,000,000 1/s | ≥ 4,000,000 1/s | **no** | null |" in table
    assert "| size | 12 MiB |  |  | a job |" in table
    assert (tmp_path / "journal.svg").read_text().count("<rect") == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("topic", "Journal!"), ("commit", "main"), ("rows", []), ("rows", [GOOD["rows"][0]] * 2), ("host", "a name")],
)
def test_other_forms_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "journal.json"
    path.write_text(json.dumps(GOOD | {field: value}))
    with pytest.raises(ValueError, match=r"journal\.json"):
        measurements.read(path)


def test_here_names_the_tree_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = Measurements.here("topic", [Row(name="n", value=1, unit="s", better="lower", conditions="none")])
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert head.startswith(found.commit.removesuffix("+changes"))
    assert "cores" in found.machine


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00123, "0.00123"), (4.25, "4.25"), (99.96, "100"), (123.4, "123"), (4123456.0, "4,120,000")],
)
def test_three_digits(value: float, text: str) -> None:
    assert show(value) == text
