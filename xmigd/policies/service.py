"""Policies: named groups of numbers, checked, kept, and applied without a restart.

A policy holds only what an operator has changed. What they have not is the setting, so that a new configuration file
takes effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from xmigd.database.models import Policy
from xmigd.database.writer import Writer
from xmigd.errors import Invalid, NotFound
from xmigd.settings import Settings


class Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What a value means, where its name alone does not say."""
        return {name: field.description for name, field in cls.model_fields.items() if field.description}

    @classmethod
    def units(cls) -> dict[str, str]:
        """What each value is measured in, or counts."""
        return {name: value["unit"] for name, value in cls.model_json_schema()["properties"].items()}


G = TypeVar("G", bound=Group)


def measured(unit: str, **options: Any) -> Any:
    """A field in this unit. What `0` means stands in its description, and not in the unit."""
    return Field(json_schema_extra={"unit": unit}, **options)


class RecoveryPolicy(Group):
    """How processes are recovered. `max_attempts` applies at once, the others to processes that begin later."""

    max_attempts: int = measured(
        "attempts", ge=1, le=1000, description="recoveries in a row without progress before it is lost"
    )
    stall_bound: float = measured(
        "seconds", gt=0, le=3600, description="below which the expected stall is kept by snapshots"
    )
    snapshot_cost: float = measured(
        "share", gt=0, le=0.5, description="share of a process's time that snapshots may cost for that"
    )
    hang_timeout: float = measured(
        "seconds", ge=0, le=1e9, description="seconds without progress that count as hung; 0: never"
    )


class BreakerPolicy(Group):
    """When the circuit breaker opens."""

    max_actions: int = measured(
        "actions", default=10, ge=1, le=10_000, description="automatic actions within the window"
    )
    window_seconds: float = measured("seconds", default=600.0, ge=1, le=86_400)


class DevicePolicy(Group):
    """When a device that faults again and again is drained, and how findings are answered, unless the circuit breaker
    is open."""

    max_faults: int = measured(
        "faults", default=0, ge=0, le=10_000, description="of the device, within the window; 0: never"
    )
    window_seconds: float = measured("seconds", default=3600.0, ge=1, le=86_400)
    health_rung: int = measured(
        "rung", default=3, ge=0, le=3,
        description="highest rung of answers to findings; 0: report, 1: cordon, 2: drain, 3: lose",
    )  # fmt: skip


class RetentionPolicy(Group):
    """What is kept for how long."""

    events: int = measured("events", ge=100, le=1_000_000, description="events that can be replayed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    name: str
    description: str
    version: int
    settings: dict[str, Any]
    defaults: dict[str, Any]
    units: dict[str, str]
    meanings: dict[str, str]
    updated_at: float | None
    updated_by: str | None


def defaults(settings: Settings) -> dict[str, Group]:
    return {
        "circuit-breaker": BreakerPolicy(),
        "devices": DevicePolicy(),
        "recovery": RecoveryPolicy(
            max_attempts=settings.max_attempts,
            stall_bound=settings.stall_bound,
            snapshot_cost=settings.snapshot_cost,
            hang_timeout=settings.hang_timeout,
        ),
        "retention": RetentionPolicy(events=settings.events_kept),
    }


class Policies:
    def __init__(self, settings: Settings, writer: Writer, readers: Engine) -> None:
        self._writer = writer
        self._defaults = defaults(settings)
        self._appliers: dict[str, Callable[[Any], None]] = {}
        with Session(readers, expire_on_commit=False) as session:
            self._rows = {row.name: row for row in session.scalars(select(Policy)) if row.name in self._defaults}

    def applied_by(self, name: str, apply: Callable[[Any], None]) -> None:
        """Called with the policy now, and whenever it changes, in the event loop's thread."""
        self._appliers[name] = apply
        apply(self.get(name))

    def get(self, name: str) -> Group:
        """Raises NotFound."""
        if name not in self._defaults:
            known = ", ".join(self._defaults)
            raise NotFound(f"there is no policy {name[:64]!r}", hint=f"there are: {known}")
        row = self._rows.get(name)
        base = self._defaults[name]
        if row is None:
            return base
        known_fields = {key: value for key, value in row.settings.items() if key in type(base).model_fields}
        try:
            return type(base).model_validate(base.model_dump() | known_fields)
        except ValidationError:  # written by another version, which allowed other values
            return base

    def group(self, name: str, kind: type[G]) -> G:
        """The policy, as what it is."""
        found = self.get(name)
        assert isinstance(found, kind)
        return found

    def state(self, name: str) -> PolicyState:
        """Raises NotFound."""
        found = self.get(name)
        row = self._rows.get(name)
        return PolicyState(
            name=name, description=" ".join((type(found).__doc__ or "").split()),
            version=0 if row is None else row.version,
            settings=found.model_dump(), defaults=self._defaults[name].model_dump(),
            units=type(found).units(), meanings=type(found).meanings(),
            updated_at=None if row is None else row.updated_at,
            updated_by=None if row is None else row.updated_by,
        )  # fmt: skip

    def states(self) -> list[PolicyState]:
        return [self.state(name) for name in self._defaults]

    async def change(
        self, name: str, change: Mapping[str, Any], *, by: str, check: Callable[[int], None]
    ) -> PolicyState:
        """Change some of its values; None: back to the setting. `check` sees the version in the transaction that
        changes it. Raises NotFound, Invalid."""
        base = self.get(name)
        for key, value in change.items():
            if key not in type(base).model_fields:
                fields = ", ".join(type(base).model_fields)
                raise Invalid(
                    f"{key[:64]}: the policy {name} has no such value", code="unknown_field", hint=f"it has: {fields}"
                )
            if isinstance(value, bool):
                raise Invalid(f"{key}: a number is wanted")
        row = self._rows.get(name)
        settings = {**({} if row is None else row.settings), **change}
        settings = {key: value for key, value in settings.items() if value is not None}
        try:
            type(base).model_validate(self._defaults[name].model_dump() | settings)
        except ValidationError as error:
            first = error.errors()[0]
            raise Invalid(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

        def write(session: Session) -> Policy:
            kept = session.get(Policy, name)
            version = 0 if kept is None else kept.version
            check(version)
            merged = Policy(
                name=name, version=version + 1, settings=settings, updated_at=time.time(), updated_by=by[:255]
            )
            session.merge(merged)
            return merged

        self._rows[name] = await self._writer.write("policies.change", write)
        if (apply := self._appliers.get(name)) is not None:
            apply(self.get(name))
        return self.state(name)
