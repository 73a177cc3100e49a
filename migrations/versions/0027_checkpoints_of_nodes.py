"""Checkpoints of jobs with ranks on several nodes

Revision: 0027
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("nodes", sa.Text(), nullable=True))
    op.add_column("checkpoints", sa.Column("whole", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.create_table(
        "part_removals",
        sa.Column("checkpoint", sa.String(32), primary_key=True),
        sa.Column("node", sa.String(64), primary_key=True),
    )


def downgrade() -> None:
    op.drop_table("part_removals")
    with op.batch_alter_table("checkpoints") as table:
        table.drop_column("whole")
        table.drop_column("nodes")
