"""What schedulers know of jobs, and webhooks

Revision: 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("external_id", sa.String(255), nullable=True))
    op.add_column("jobs", sa.Column("priority", sa.String(16), nullable=False, server_default="normal"))
    op.add_column("jobs", sa.Column("reserved_bytes", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("restored_from", sa.String(32), nullable=True))
    op.add_column("jobs", sa.Column("version", sa.Integer(), nullable=False, server_default="1"))
    op.create_index("ix_jobs_external_id", "jobs", ["external_id"])
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("key", sa.String(63), nullable=False),
        sa.Column("value", sa.String(255), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_labels_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "key", name="pk_job_labels"),
    )
    op.create_index("ix_job_labels_key_value", "job_labels", ["key", "value"])
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.String(255), nullable=False),
        sa.Column("types", sa.JSON(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(255), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("delivered", sa.Integer(), nullable=False),
        sa.Column("dropped", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_table(
        "dead_letters",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("webhook_id", sa.String(32), nullable=False),
        sa.Column("event_id", sa.Integer(), nullable=False),
        sa.Column("event", sa.JSON(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("queued", sa.Boolean(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name="fk_dead_letters_webhook_id_webhooks", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("number", name="pk_dead_letters"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_dead_letters_webhook_id_number", "dead_letters", ["webhook_id", "number"])


def downgrade() -> None:
    op.drop_table("dead_letters")
    op.drop_table("webhooks")
    op.drop_table("job_labels")
    op.drop_index("ix_jobs_external_id", "jobs")
    for name in ("version", "restored_from", "reserved_bytes", "priority", "external_id"):
        op.drop_column("jobs", name)
