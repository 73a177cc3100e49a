"""The nodes that a job's ranks are on

Revision: 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("nodes", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "nodes")
