"""When checkpoints are made without a request, and which are in the mirror

Revision: 0017
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("by_policy", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("checkpoints", sa.Column("mirrored_in", sa.Text(), nullable=True))
    op.create_table(
        "unmirrored_checkpoints",
        sa.Column("id", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_unmirrored_checkpoints"),
    )
    op.create_table(
        "checkpoint_policies",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("every_minutes", sa.Double(), nullable=True),
        sa.Column("keep", sa.Integer(), nullable=False),
        sa.Column("before_drain", sa.Boolean(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("updated_by", sa.String(255), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_checkpoint_policies_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name="pk_checkpoint_policies"),
    )


def downgrade() -> None:
    op.drop_table("checkpoint_policies")
    op.drop_table("unmirrored_checkpoints")
    op.drop_column("checkpoints", "mirrored_in")
    op.drop_column("checkpoints", "by_policy")
