"""Devices, jobs, processes, journal segments, faults, recoveries

Revision: 0001, the first
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "devices",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("configured", sa.Boolean(), nullable=False),
        sa.Column("memory_bytes", sa.Integer(), nullable=True),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_devices")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("uid", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=True),
        sa.Column("registered", sa.Boolean(), nullable=False),
        sa.Column("token_hash", sa.String(length=64), nullable=True),
        sa.Column("stopped", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_table(
        "processes",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("start_time", sa.Integer(), nullable=False),
        sa.Column("uid", sa.Integer(), nullable=False),
        sa.Column("gid", sa.Integer(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("device", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("server_pid", sa.Integer(), nullable=True),
        sa.Column("server_start_time", sa.Integer(), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_processes_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_processes")),
    )
    with op.batch_alter_table("processes", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_processes_job_id"), ["job_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_processes_state"), ["state"], unique=False)

    op.create_table(
        "faults",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("process_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=True),
        sa.Column("op", sa.String(length=128), nullable=True),
        sa.Column("error", sa.Integer(), nullable=True),
        sa.Column("injection", sa.Integer(), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["process_id"], ["processes.id"], name=op.f("fk_faults_process_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_faults")),
        sa.UniqueConstraint("process_id", "number", name=op.f("uq_faults_process_id_number")),
    )
    with op.batch_alter_table("faults", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_faults_at"), ["at"], unique=False)

    op.create_table(
        "journal_segments",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("process_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("journal_bytes", sa.Integer(), nullable=False),
        sa.Column("live_bytes", sa.Integer(), nullable=False),
        sa.Column("copied_bytes", sa.Integer(), nullable=False),
        sa.Column("chunks", sa.Integer(), nullable=False),
        sa.Column("objects", sa.Integer(), nullable=False),
        sa.Column("ms", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["process_id"], ["processes.id"], name=op.f("fk_journal_segments_process_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_journal_segments")),
        sa.UniqueConstraint("process_id", "number", name=op.f("uq_journal_segments_process_id_number")),
    )
    op.create_table(
        "recoveries",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("process_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("fault", sa.Integer(), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("standby", sa.String(length=16), nullable=False),
        sa.Column("cut", sa.Integer(), nullable=False),
        sa.Column("detected_ms", sa.Double(), nullable=False),
        sa.Column("standby_ready_ms", sa.Double(), nullable=True),
        sa.Column("mapped_ms", sa.Double(), nullable=True),
        sa.Column("restored_ms", sa.Double(), nullable=True),
        sa.Column("redone_ms", sa.Double(), nullable=True),
        sa.Column("resumed_ms", sa.Double(), nullable=True),
        sa.Column("records", sa.Integer(), nullable=True),
        sa.Column("compared", sa.Integer(), nullable=True),
        sa.Column("differing", sa.Integer(), nullable=True),
        sa.Column("first_difference", sa.Integer(), nullable=True),
        sa.Column("delivered_sequence", sa.Integer(), nullable=True),
        sa.Column("delivered_error", sa.Integer(), nullable=True),
        sa.Column("story", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["process_id"], ["processes.id"], name=op.f("fk_recoveries_process_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_recoveries")),
        sa.UniqueConstraint("process_id", "number", name=op.f("uq_recoveries_process_id_number")),
    )
    with op.batch_alter_table("recoveries", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_recoveries_at"), ["at"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("recoveries", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_recoveries_at"))

    op.drop_table("recoveries")
    op.drop_table("journal_segments")
    with op.batch_alter_table("faults", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_faults_at"))

    op.drop_table("faults")
    with op.batch_alter_table("processes", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_processes_state"))
        batch_op.drop_index(batch_op.f("ix_processes_job_id"))

    op.drop_table("processes")
    op.drop_table("jobs")
    op.drop_table("devices")
