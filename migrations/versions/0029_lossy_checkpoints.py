"""Checkpoints of which named optimizer state was rounded, and policies that want it

Revision: 0029
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("lossy", sa.JSON(), nullable=True))
    op.add_column("checkpoint_policies", sa.Column("keep_bits", sa.Integer(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("checkpoints") as table:
        table.drop_column("lossy")
    with op.batch_alter_table("checkpoint_policies") as table:
        table.drop_column("keep_bits")
