"""What a program stood still for while it moved to another node, and what had come ahead

Revision: 0030
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("transfers", sa.Column("took", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("transfers", sa.Column("content_bytes", sa.Integer(), nullable=True))
    op.add_column("transfers", sa.Column("ahead_bytes", sa.Integer(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("transfers") as table:
        table.drop_column("took")
        table.drop_column("content_bytes")
        table.drop_column("ahead_bytes")
