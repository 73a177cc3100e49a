"""The packages as files: what they contain and declare, that two builds are the same, what systemd thinks of units."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.packages.conftest import BUILT, packages

UNITS = ROOT / "packaging" / "systemd"
# What `systemd-analyze security` reaches, times ten; docs/decisions/0016 and 0028 say what stays open and why.
EXPOSURE = {"xmigd.service": 49, "xmig-web.service": 13}
NAMES = ["xmig-slurm", "xmigd", "xmigd-shim", "xmigd-web"]


def ask(*arguments: str | Path) -> str:
    return subprocess.run(["rpm", "-qp", *arguments], check=True, capture_output=True, text=True).stdout


def digests(build: str) -> dict[str, str]:
    files = [*packages(build), *(BUILT / build / "SRPMS").glob("*.rpm"), *(BUILT / build / "wheel").glob("*.whl")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_two_builds_in_different_folders_are_the_same() -> None:
    """Binary packages, source package, wheel."""
    first = digests("first")
    if not (BUILT / "second" / "RPMS").is_dir():
        pytest.skip("make built-packages builds them twice")
    assert first == digests("second")
    assert len(first) == len(NAMES) + 2


def test_names_and_versions() -> None:
    for build, release in (("first", "1"), ("next", "2")):
        found = [ask("--queryformat", "%{name} %{version}-%{release}", path) for path in packages(build)]
        assert found == [f"{name} 0.1.0-{release}" for name in NAMES]


# In the place of a distribution's own macros: their results show that they were used, and no fallback.
SYSTEMD = {
    "_unitdir": "/usr/lib/systemd/system",
    **{f"systemd_{name}()": f"their-systemd_{name} %{{*}}" for name in ("post", "preun", "postun_with_restart")},
}
PYPROJECT = {"pyproject_wheel": "their-pyproject_wheel", "_pyproject_wheeldir": "/their/wheels"}
OPENEULER = {"openEuler": "2", "dist": ".oe2403", "python3_version": "3.11"}
FEDORA = {"fedora": "42", "dist": ".fc42", "python3_version": "3.13"}


def expand(macros: dict[str, str]) -> str:
    """The spec as rpm reads it on a host with these macros."""
    if shutil.which("rpmspec") is None:
        pytest.skip("there is no rpmspec here; packaging/setup/system.sh packages installs it")
    defined = [word for name, body in macros.items() for word in ("--define", f"{name} {body}")]
    command = ["rpmspec", "--parse", *defined, str(ROOT / "xmig.spec")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def scriptlets(spec: str) -> dict[str, str]:
    """What runs when packages come and go: %post -n xmigd → its text."""
    found = re.findall(r"^%((?:post|preun|postun) -n \S+)\n(.*?)(?=^%|\Z)", spec, re.MULTILINE | re.DOTALL)
    return {name: text.strip() for name, text in found}


@pytest.mark.parametrize(
    ("host", "release", "python"), [(OPENEULER, "1.oe2403", "3.11"), (FEDORA, "1.fc42", "3.13")],
    ids=["openEuler", "Fedora"],
)  # fmt: skip
def test_the_spec_uses_the_macros_of_its_distribution(host: dict[str, str], release: str, python: str) -> None:
    spec = expand(host | SYSTEMD | PYPROJECT)
    # Users and folders are made by systemd's own triggers there, for every file that a package brings.
    assert scriptlets(spec) == {
        "post -n xmigd": ":\ntheir-systemd_post xmigd.service",
        "preun -n xmigd": "their-systemd_preun xmigd.service",
        "postun -n xmigd": "their-systemd_postun_with_restart xmigd.service",
        "post -n xmigd-web": ":\ntheir-systemd_post xmig-web.service",
        "preun -n xmigd-web": "their-systemd_preun xmig-web.service",
        "postun -n xmigd-web": "their-systemd_postun_with_restart xmig-web.service",
    }
    assert "their-pyproject_wheel" in spec
    assert "built=/their/wheels" in spec
    assert "pip wheel" not in spec
    assert re.search(rf"^Release: +{re.escape(release)}$", spec, re.MULTILINE)
    assert re.search(rf"^Requires: +python\(abi\) = {re.escape(python)}$", spec, re.MULTILINE)


def test_the_spec_replaces_macros_that_are_not_there() -> None:
    spec = expand(OPENEULER)
    reported = scriptlets(spec)
    assert "systemctl --no-reload preset xmigd.service" in reported["post -n xmigd"]
    assert "systemctl --no-reload disable --now xmig-web.service" in reported["preun -n xmigd-web"]
    assert "systemctl try-restart xmigd.service" in reported["postun -n xmigd"]
    assert "built=pyproject-wheeldir" in spec
    assert "pip wheel --quiet --no-deps" in spec
    assert "/usr/lib/systemd/system/xmigd.service" in spec
    assert "%{" not in spec.partition("%changelog")[0].replace("%{buildroot}", "")
    elsewhere = scriptlets(expand({}))
    assert elsewhere["post -n xmigd"].startswith("systemd-tmpfiles --create xmigd.conf || :")
    assert elsewhere["post -n xmigd-web"].startswith("systemd-sysusers xmig-web.conf || :")


def test_rpmlint_finds_nothing() -> None:
    if shutil.which("rpmlint") is None:
        pytest.skip("there is no rpmlint here")
    config = ROOT / "packaging" / "rpm" / "xmig.rpmlintrc"
    done = subprocess.run(
        ["rpmlint", "--rpmlintrc", config, *packages("first"), *(BUILT / "first" / "SRPMS").glob("*.rpm")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if re.search(r": [EW]: ", line)]
    assert not found, "\n".join(found)


def test_no_driver_is_required_or_provided() -> None:
    for path in packages("first"):
        for line in ask("--requires", "--provides", path).splitlines():
            assert not line.startswith(("libcuda", "libnvidia")), (path.name, line)


def test_where_files_are() -> None:
    allowed = re.compile(
        r"/usr/bin/(xmigd|xmigctl|xmig-web|xmig-kubernetes)$|/usr/lib64/xmig(/|$)|/usr/lib/systemd/system(-preset)?/\S*xmig"
        r"|/usr/lib/(sysusers|tmpfiles)\.d/xmig|/usr/share/(doc|licenses)/xmig(d|-slurm)|/etc/xmig(/|$)"
        r"|/usr/share/(bash-completion|zsh|fish)/|/usr/(libexec/xmig|share/xmig)(/|$)"
    )
    for path in packages("first"):
        for name in ask("--list", path).split():
            assert allowed.match(name), name
    settings = [ask("--configfiles", path).split() for path in packages("first")]
    assert settings == [[], ["/etc/xmig/xmigd.toml"], [], ["/etc/xmig/xmig-web.toml"]]


def test_what_is_bundled_is_declared() -> None:
    """The same in the package's provides, in the SBOM, and in the wheels."""
    provides = ask("--provides", packages("first")[NAMES.index("xmigd")])
    declared = dict(re.findall(r"bundled\(python3dist\(([^)]+)\)\) = (\S+)", provides))
    sbom = json.loads((BUILT / "first" / "SOURCES" / "xmig.cdx.json").read_text())
    listed = {c["name"]: c for c in sbom["components"] if c["purl"].startswith("pkg:pypi/")}
    assert declared == {name: component["version"] for name, component in listed.items()}
    assert all(component["licenses"][0]["expression"] for component in sbom["components"])
    wheels = ROOT / ".cache" / "vendor" / "wheels" / "run"
    hashes = {hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels.glob("*.whl")}
    assert {component["hashes"][0]["content"] for component in listed.values()} == hashes
    assert {"bundled(xxhash)", "bundled(nlohmann-json)"} <= set(provides.split())


def test_units_are_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    for unit in UNITS.glob("*.s*ce"):
        text = unit.read_text().replace("/usr/bin/xmig", f"{sys.executable} /usr/bin/xmig")
        (tmp_path / unit.name).write_text(text.replace(" file:///usr/share/doc/xmigd/install.md", " man:systemd(1)"))
    units = sorted(tmp_path.iterdir())
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *map(str, units)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # It looks at the machine's other units, too.
    ours = [line for line in done.stderr.splitlines() if "xmig" in line]
    assert not ours, "\n".join(ours)


@pytest.mark.parametrize("unit", sorted(EXPOSURE))
def test_units_are_no_more_exposed_than_they_were(unit: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE[unit]}"]
    command.append(str(UNITS / unit))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_the_wheel_says_where_it_runs(wheel: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheel], check=True, capture_output=True, text=True
    ).stdout
    tag = re.search(r"manylinux_\d+_\d+_x86_64", wheel.name)
    assert tag is not None
    assert f'"{tag[0]}"' in " ".join(shown.split()), shown
    names = zipfile.ZipFile(wheel).namelist()
    for part in (
        "libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2", "xmig-server", "xmig-descriptor-store", "xmig-nvml-probe",
        "xmig-pod", "xmig_kernels.so",
    ):  # fmt: skip
        assert f"xmigd/native/{part}" in names
    assert any(name.endswith("share/xmig/xmigd.service") for name in names)
