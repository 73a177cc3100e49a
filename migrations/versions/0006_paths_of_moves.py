"""How a move's content went

Revision: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("migrations", sa.Column("path", sa.String(length=8), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("migrations", schema=None) as batch_op:
        batch_op.drop_column("path")
