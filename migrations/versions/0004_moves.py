"""Moves and suspensions

Revision: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "processes", sa.Column("location", sa.String(length=16), nullable=False, server_default=sa.text("'device'"))
    )
    op.create_table(
        "migrations",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("operation_id", sa.String(length=32), nullable=True),
        sa.Column("process_id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("engine", sa.String(length=16), nullable=False),
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("phase", sa.String(length=32), nullable=False),
        sa.Column("phases", sa.JSON(), nullable=False),
        sa.Column("iterations", sa.JSON(), nullable=False),
        sa.Column("total_bytes", sa.Integer(), nullable=True),
        sa.Column("processed_bytes", sa.Integer(), nullable=True),
        sa.Column("bytes_per_s", sa.Double(), nullable=True),
        sa.Column("dirty_bytes_per_s", sa.Double(), nullable=True),
        sa.Column("max_downtime_ms", sa.Double(), nullable=True),
        sa.Column("expected_downtime_ms", sa.Double(), nullable=True),
        sa.Column("downtime_ms", sa.Double(), nullable=True),
        sa.Column("setup_ms", sa.Double(), nullable=True),
        sa.Column("code", sa.String(length=64), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("process_location", sa.String(length=16), nullable=False),
        sa.Column("target_pid", sa.Integer(), nullable=True),
        sa.Column("target_start_time", sa.Integer(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["process_id"], ["processes.id"], name=op.f("fk_migrations_process_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_migrations")),
        sa.UniqueConstraint("id", name=op.f("uq_migrations_id")),
    )
    with op.batch_alter_table("migrations", schema=None) as batch_op:
        for column in ("operation_id", "process_id", "state"):
            batch_op.create_index(batch_op.f(f"ix_migrations_{column}"), [column], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("migrations", schema=None) as batch_op:
        for column in ("state", "process_id", "operation_id"):
            batch_op.drop_index(batch_op.f(f"ix_migrations_{column}"))
    op.drop_table("migrations")
    with op.batch_alter_table("processes", schema=None) as batch_op:
        batch_op.drop_column("location")
