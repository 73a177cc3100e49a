"""Jobs that move from node to node

Revision: 0020
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "transfers",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("direction", sa.String(3), nullable=False),
        sa.Column("peer", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=True),
        sa.Column("job_name", sa.String(255), nullable=False),
        sa.Column("process_id", sa.String(32), nullable=True),
        sa.Column("uid", sa.Integer(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("target", sa.String(64), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("start_time", sa.Integer(), nullable=True),
        sa.Column("peer_job", sa.String(32), nullable=True),
        sa.Column("peer_informed", sa.Boolean(), nullable=False),
        sa.Column("rounds", sa.JSON(), nullable=False),
        sa.Column("standstill_ms", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_transfers"),
    )
    op.create_index("ix_transfers_created_at", "transfers", ["created_at"])
    op.create_index("ix_transfers_job_id", "transfers", ["job_id"])


def downgrade() -> None:
    op.drop_table("transfers")
