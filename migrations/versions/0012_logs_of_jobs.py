"""Logs of jobs, and what of them is not protected

Revision: 0012
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "log_lines",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("process_id", sa.String(length=32), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("source", sa.String(length=8), nullable=False),
        sa.Column("level", sa.String(length=8), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_log_lines_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_log_lines")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_log_lines_job_id_id", "log_lines", ["job_id", "id"])
    op.add_column("jobs", sa.Column("strict", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("processes", sa.Column("unprotected", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("processes", "unprotected")
    op.drop_column("jobs", "strict")
    op.drop_index("ix_log_lines_job_id_id", "log_lines")
    op.drop_table("log_lines")
