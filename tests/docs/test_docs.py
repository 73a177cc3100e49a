"""The docs say what the code does: nothing is missing in them, nothing in them is missing in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings
from typer.main import get_command

from tests.docs import api, cli, errors, settings
from tests.docs.pages import DOCS, PAGES
from tests.harness import ROOT
from xmigd.cli import make_app
from xmigd.kubernetes.settings import KubernetesSettings
from xmigd.problems import PROBLEMS
from xmigd.settings import Settings
from xmigd.web.settings import WebSettings


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_up_to_date(name: str) -> None:
    path = ROOT / name
    assert path.exists(), "run make docs"
    assert path.read_text() == PAGES[name](), f"{name} is out of date: run make docs"


@pytest.mark.parametrize("kind", [Settings, WebSettings, KubernetesSettings])
def test_every_setting_is_described(kind: type[BaseSettings]) -> None:
    assert [name for name, field in kind.model_fields.items() if not field.description] == []


def test_every_variable_is_described() -> None:
    known = settings.OTHERS.keys() | {
        settings.variable(name, kind)
        for kind in (Settings, WebSettings, KubernetesSettings)
        for name in kind.model_fields
    }
    read = settings.variables_read()
    assert read <= known, "describe it in tests/docs/settings.py"
    assert settings.OTHERS.keys() <= read, "nobody reads it any more"


def test_every_error_code_is_explained() -> None:
    used = errors.codes_in_source()
    assert used - PROBLEMS.keys() == set(), "explain it in xmigd/problems.py"
    assert PROBLEMS.keys() - used == set(), "no error has this code any more"
    assert all(meaning and what for meaning, what in PROBLEMS.values())


def test_every_endpoint_has_a_sentence() -> None:
    for path, methods in api.document()["paths"].items():
        for method, endpoint in methods.items():
            assert endpoint.get("description"), f"{method} {path} needs a docstring"


def test_every_command_and_option_is_described() -> None:
    for name, command in cli.commands(get_command(make_app())):
        assert command.help, name
        for parameter in command.params:
            assert parameter.help or parameter.name in ("help", "shell"), f"{name} {parameter.name}"


LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]+)?(#[^)\s]+)?\)")
PROSE = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in LINK.findall(path.read_text()):
        place = (path.parent / target).resolve() if target else path
        assert place.exists(), f"{target} does not exist"
        if anchor and place.suffix == ".md":
            assert anchor[1:] in anchors(place.read_text()), f"{target}{anchor} does not exist"


def anchors(text: str) -> set[str]:
    """As GitHub makes them out of titles."""
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Of all commands. To make them takes longer than to look for them in a page."""
    return {name for name, _ in cli.commands(get_command(make_app()))}


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_prose_exist(path: Path, names: set[str]) -> None:
    """`xmigctl ...` in any page is a command that there is, and `make ...` a target."""
    text = path.read_text()
    groups = {name[: space.start()] for name in names for space in re.finditer(" ", name)}
    for words in re.findall(r"xmigctl((?: [a-z]+(?:-[a-z]+)*)+)", text):
        named, *rest = words.split()
        while named in groups and rest:
            named = f"{named} {rest.pop(0)}"
            assert named in names | groups, f"xmigctl{words}"
    for first in re.findall(r"`(?:\S*/)?xmigctl ([a-z]+(?:-[a-z]+)*)", text):
        assert first in names | groups, f"xmigctl {first}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"`make ([a-z][a-z-]*)`", text):
        assert target in targets, f"make {target}"


def test_every_claim_of_the_threat_model_has_a_test() -> None:
    text = (DOCS / "threat-model.md").read_text()
    tables = text[text.index("## Callers of the API") : text.index("## What is not protected")]
    claims = [row for row in tables.splitlines() if row.startswith("| ") and not row.startswith("| claim")]
    assert len(claims) > 20
    for claim in claims:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", claim)
        assert named, f"no test: {claim}"
        for path, name in named:
            assert (ROOT / path).exists(), path
            assert re.search(rf"def {name}\(", (ROOT / path).read_text()), f"{path} has no {name}"


def test_every_folder_of_the_daemon_is_described() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent.relative_to(ROOT / "xmigd") for path in (ROOT / "xmigd").rglob("__init__.py")}
    missing = [str(folder) for folder in folders if len(folder.parts) == 1 and f"`{folder}/`" not in text]
    assert missing == [], "say in docs/architecture.md what it is"
