"""When and with what jobs and processes ended; when tokens were used

Revision: 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

ENDS = ("exit_code", "exit_signal")


def upgrade() -> None:
    for name in ("runner_pid", "runner_start"):
        op.add_column("jobs", sa.Column(name, sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("ended_at", sa.Double(), nullable=True))
    for table in ("jobs", "processes"):
        for name in ENDS:
            op.add_column(table, sa.Column(name, sa.Integer(), nullable=True))
    op.add_column("tokens", sa.Column("last_used_at", sa.Double(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("tokens", schema=None) as batch_op:
        batch_op.drop_column("last_used_at")
    for table in ("processes", "jobs"):
        with op.batch_alter_table(table, schema=None) as batch_op:
            for name in ENDS:
                batch_op.drop_column(name)
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        for name in ("ended_at", "runner_start", "runner_pid"):
            batch_op.drop_column(name)
