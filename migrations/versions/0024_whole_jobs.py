"""Transfers are of jobs with several processes

Revision: 0024
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

COLUMNS = ("processes", "devices", "pids")


def upgrade() -> None:
    for name in COLUMNS:
        op.add_column("transfers", sa.Column(name, sa.JSON(), nullable=False, server_default="[]"))
    op.execute("UPDATE transfers SET processes = json_array(process_id) WHERE process_id IS NOT NULL")
    op.execute("UPDATE transfers SET devices = json_array(source) WHERE direction = 'out'")
    op.execute("UPDATE transfers SET devices = json_array(target) WHERE direction = 'in'")


def downgrade() -> None:
    with op.batch_alter_table("transfers") as table:
        for name in COLUMNS:
            table.drop_column(name)
