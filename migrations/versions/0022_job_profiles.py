"""What was measured of a job while it ran

Revision: 0022
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_profiles",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("peak_bytes", sa.Integer(), nullable=False),
        sa.Column("minute_bytes", sa.Integer(), nullable=True),
        sa.Column("minute_calls", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_profiles_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name="pk_job_profiles"),
    )


def downgrade() -> None:
    op.drop_table("job_profiles")
