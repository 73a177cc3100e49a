"""What is done about ranks that are no replicas any more

Revision: 0014
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("replica_policy", sa.String(length=16), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "replica_policy")
