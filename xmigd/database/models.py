"""The tables. Times of day are Unix seconds (float, UTC); durations are milliseconds."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)


class Device(Base):
    """A device of this node, as the settings name it: `cpu:0`."""

    __tablename__ = "devices"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    ordinal: Mapped[int]
    configured: Mapped[bool]  # False: an earlier configuration had it
    memory_bytes: Mapped[int | None]
    seen_at: Mapped[float]


class Job(Base):
    """What one `xmigctl run` started, or one process that came by itself."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(255))
    command: Mapped[str] = mapped_column(Text)
    uid: Mapped[int]
    device: Mapped[str | None] = mapped_column(String(64))
    registered: Mapped[bool]
    token_hash: Mapped[str | None] = mapped_column(String(64))
    hang_timeout: Mapped[float | None]  # seconds; null: the daemon's setting
    stopped: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[float]


class Process(Base):
    """One program and its chain of servers."""

    __tablename__ = "processes"
    __table_args__ = (Index(None, "state"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    pid: Mapped[int]
    start_time: Mapped[int]  # clock ticks since boot: with the pid, the process's identity
    uid: Mapped[int]
    gid: Mapped[int]
    command: Mapped[str] = mapped_column(Text)
    device: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    why: Mapped[str] = mapped_column(Text)
    server_pid: Mapped[int | None]
    server_start_time: Mapped[int | None]
    generation: Mapped[int] = mapped_column(default=0)
    started_at: Mapped[float]
    ended_at: Mapped[float | None]


class JournalSegment(Base):
    """The part of a journal that a cut made unnecessary; one row per cut, the newest of each process are kept."""

    __tablename__ = "journal_segments"
    __table_args__ = (UniqueConstraint("process_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    process_id: Mapped[str] = mapped_column(ForeignKey("processes.id", ondelete="CASCADE"))
    number: Mapped[int]
    position: Mapped[int]
    sequence: Mapped[int]
    journal_bytes: Mapped[int]
    live_bytes: Mapped[int]
    copied_bytes: Mapped[int]
    chunks: Mapped[int]
    objects: Mapped[int]
    ms: Mapped[float]
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[float]


class Fault(Base):
    __tablename__ = "faults"
    __table_args__ = (UniqueConstraint("process_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    process_id: Mapped[str] = mapped_column(ForeignKey("processes.id", ondelete="CASCADE"))
    number: Mapped[int]
    kind: Mapped[str] = mapped_column(String(16))
    text: Mapped[str] = mapped_column(Text)
    sequence: Mapped[int | None]
    op: Mapped[str | None] = mapped_column(String(128))
    error: Mapped[int | None]
    injection: Mapped[int | None]
    at: Mapped[float] = mapped_column(index=True)


class Recovery(Base):
    """From the first fault to the moment the program goes on. Phases: milliseconds since the fault occurred."""

    __tablename__ = "recoveries"
    __table_args__ = (UniqueConstraint("process_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    process_id: Mapped[str] = mapped_column(ForeignKey("processes.id", ondelete="CASCADE"))
    number: Mapped[int]
    cause: Mapped[str] = mapped_column(Text)
    fault: Mapped[int | None]  # the number of the fault that began it
    outcome: Mapped[str] = mapped_column(String(16))
    attempts: Mapped[int]
    standby: Mapped[str] = mapped_column(String(16))
    cut: Mapped[int]
    detected_ms: Mapped[float]
    standby_ready_ms: Mapped[float | None]
    mapped_ms: Mapped[float | None]
    restored_ms: Mapped[float | None]
    redone_ms: Mapped[float | None]
    resumed_ms: Mapped[float | None]
    records: Mapped[int | None]
    compared: Mapped[int | None]
    differing: Mapped[int | None]
    first_difference: Mapped[int | None]
    delivered_sequence: Mapped[int | None]
    delivered_error: Mapped[int | None]
    story: Mapped[str] = mapped_column(Text)  # why each attempt was made, a line each
    at: Mapped[float] = mapped_column(index=True)
