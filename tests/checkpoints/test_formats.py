"""docs/formats.md describes manifests as xmigd.checkpoints.manifest has them."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel, ValidationError

from tests.harness import ROOT
from xmigd.checkpoints import manifest
from xmigd.checkpoints.manifest import Manifest

PAGE = (ROOT / "docs" / "formats.md").read_text()
EMPTY = Manifest(
    id="0" * 32, job="1" * 32, job_name="trains", node="a", xmig_version="1", created_at=1.5, programs=()
).model_dump_json()  # fmt: skip
MODELS = [
    model
    for model in vars(manifest).values()
    if isinstance(model, type) and issubclass(model, BaseModel) and model.__module__ == manifest.__name__
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_field_is_described(model: type[BaseModel]) -> None:
    described = set(re.findall(r"`(\w+)`", PAGE.partition("## The manifest")[2]))
    assert model.model_fields.keys() <= described


def test_other_versions_and_unknown_fields_are_refused() -> None:
    assert Manifest.model_validate_json(EMPTY).format == 1
    for changed in (EMPTY.replace('"format":1', '"format":2'), EMPTY.replace("{", '{"more":1,', 1)):
        assert changed != EMPTY
        with pytest.raises(ValidationError):
            Manifest.model_validate_json(changed)
