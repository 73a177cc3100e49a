"""Findings of devices

Revision: 0019
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "findings",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(64), nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("rung", sa.String(8), nullable=False),
        sa.Column("source", sa.String(255), nullable=False),
        sa.Column("first_at", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("closed_by", sa.String(255), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_findings"),
    )
    op.create_index("ix_findings_device", "findings", ["device"])
    op.create_index("ix_findings_closed_at", "findings", ["closed_at"])


def downgrade() -> None:
    op.drop_table("findings")
