"""Faults that somebody has acknowledged

Revision: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("faults", sa.Column("acknowledged_at", sa.Double(), nullable=True))
    op.add_column("faults", sa.Column("acknowledged_by", sa.String(length=255), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("faults", schema=None) as batch_op:
        batch_op.drop_column("acknowledged_by")
        batch_op.drop_column("acknowledged_at")
