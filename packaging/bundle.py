"""What the packages carry of others: bundle.py WHEELS OUT writes, of the wheels in a folder and of what is compiled in,

bundled.txt     a line for each: name, version, licence; xmig.spec makes its `Provides: bundled(...)` of it
BUNDLED.md      the same as a table for people
xmig.cdx.json   the same as a CycloneDX 1.6 SBOM, with the wheels' hashes

Nothing in them depends on when or where they are made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import uuid
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

# Licences whose wheels name them only by a classifier.
CLASSIFIERS = {
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "License :: OSI Approved :: ISC License (ISCL)": "ISC",
    "License :: OSI Approved :: Python Software Foundation License": "PSF-2.0",
}
# And those that name them as people do.
NAMES = {
    "MIT License": "MIT",
    "BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "ISC License": "ISC",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
}


@dataclass(frozen=True, order=True)
class Component:
    """A package of others. `kind`: python3dist, or lib for what is compiled in."""

    name: str
    version: str
    licence: str
    kind: str = "python3dist"
    sha256: str = ""

    @property
    def purl(self) -> str:
        return f"pkg:{'pypi' if self.kind == 'python3dist' else 'generic'}/{self.name}@{self.version}"


def licence_of(metadata: Message) -> str:
    """An SPDX expression. Raises ValueError: the wheel does not say, and somebody has to look."""
    if expression := metadata.get("License-Expression"):
        return str(expression)
    if (reported := str(metadata.get("License") or "").strip()) and "\n" not in reported and len(reported) < 60:
        return NAMES.get(reported, reported)
    for classifier in metadata.get_all("Classifier") or []:
        if classifier in CLASSIFIERS:
            return CLASSIFIERS[classifier]
    raise ValueError(f"{metadata['Name']} does not say what its licence is")


def read_wheel(path: Path) -> Component:
    with zipfile.ZipFile(path) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(wheel.read(name).decode())
    normal = metadata["Name"].lower().replace("_", "-").replace(".", "-")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Component(normal, metadata["Version"], licence_of(metadata), sha256=digest)


def sbom(product: dict[str, Any], components: list[Component]) -> dict[str, Any]:
    """A CycloneDX document. Its serial number is that of its content."""

    def entry(component: Component) -> dict[str, Any]:
        found: dict[str, Any] = {
            "type": "library", "bom-ref": component.purl, "name": component.name, "version": component.version,
            "purl": component.purl, "licenses": [{"expression": component.licence}],
        }  # fmt: skip
        if component.sha256:
            found["hashes"] = [{"alg": "SHA-256", "content": component.sha256}]
        return found

    root = f"pkg:generic/xmig@{product['version']}"
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {
            "component": {
                "type": "application", "bom-ref": root, "name": "xmig", "version": product["version"],
                "licenses": [{"expression": product["license"]}],
            }
        },
        "components": [entry(component) for component in components],
        "dependencies": [{"ref": root, "dependsOn": [component.purl for component in components]}],
    }  # fmt: skip
    content = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()
    return {"serialNumber": f"urn:uuid:{uuid.UUID(bytes=content[:16], version=4)}", **document}


# Libraries of headers, and those that are linked in: where the build host says which version it has, and their licence.
COMPILED_IN = {
    "xxhash": ("xxhash.h", r"XXH_VERSION_(?:MAJOR|MINOR|RELEASE) +(\d+)", "BSD-2-Clause"),
    "nlohmann-json": ("nlohmann/detail/abi_macros.hpp", r"define NLOHMANN_JSON_VERSION_[A-Z]+ (\d+)", "MIT"),
    "libstdc++": ("", "", "GPL-3.0-or-later WITH GCC-exception-3.1"),
}


def compiled_in() -> list[Component]:
    """What the native part contains of others."""
    found = []
    for name, (header, pattern, licence) in COMPILED_IN.items():
        if header:
            text = (Path("/usr/include") / header).read_text()
            version = ".".join(re.findall(pattern, text)[:3])
        else:
            command = [os.environ.get("CXX", "c++"), "-dumpfullversion"]
            version = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        found.append(Component(name, version, licence, "lib"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    root = Path(__file__).parent.parent
    product = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    components = sorted(read_wheel(path) for path in options.wheels.glob("*.whl")) + compiled_in()
    if len(components) < len(product["dependencies"]):
        sys.exit(f"bundle.py: {options.wheels} does not hold what xMIG depends on")
    lines = [f"{c.kind} {c.name} {c.version} {c.licence}\n" for c in components]
    (options.out / "bundled.txt").write_text("".join(lines))
    rows = [f"| {c.name} | {c.version} | {c.licence} |\n" for c in components]
    head = "# What xMIG's packages carry of others\n\n| package | version | licence |\n|---|---|---|\n"
    (options.out / "BUNDLED.md").write_text(head + "".join(rows))
    (options.out / "xmig.cdx.json").write_text(json.dumps(sbom(product, components), indent=1) + "\n")


if __name__ == "__main__":
    main()
