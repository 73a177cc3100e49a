"""Checkpoints, and what a restored process was before

Revision: 0016
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("processes", sa.Column("origin", sa.String(32), nullable=True))
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("job_name", sa.String(255), nullable=False),
        sa.Column("uid", sa.Integer(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("device", sa.String(64), nullable=False),
        sa.Column("programs", sa.Integer(), nullable=False),
        sa.Column("content_bytes", sa.Integer(), nullable=False),
        sa.Column("stored_bytes", sa.Integer(), nullable=False),
        sa.Column("manifest", sa.String(64), nullable=False),
        sa.Column("standstill_ms", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
    )
    op.create_index("ix_checkpoints_created_at", "checkpoints", ["created_at"])
    op.create_index("ix_checkpoints_job_id", "checkpoints", ["job_id"])


def downgrade() -> None:
    op.drop_table("checkpoints")
    op.drop_column("processes", "origin")
