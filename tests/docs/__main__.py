"""`make docs`: write the files that are made from the code."""

from __future__ import annotations

from tests.docs.pages import PAGES
from tests.harness import ROOT

for name, page in PAGES.items():
    (ROOT / name).parent.mkdir(exist_ok=True)
    (ROOT / name).write_text(page())
    print(name)
