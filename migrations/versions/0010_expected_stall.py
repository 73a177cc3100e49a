"""The stall that was expected at a fault, and what a snapshot's time went into; `cut_budget` is called `snapshot_cost`

Revision: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

SEGMENTS = ("waited_ms", "hash_ms", "copy_ms")


def rename(old: str, new: str) -> None:
    """A value of the recovery policy, where an operator has set it."""
    op.execute(
        f"UPDATE policies SET settings = json_remove(json_set(settings, '$.{new}', json_extract(settings, '$.{old}')), "
        f"'$.{old}') WHERE name = 'recovery' AND json_extract(settings, '$.{old}') IS NOT NULL"
    )


def upgrade() -> None:
    op.add_column("recoveries", sa.Column("expected_ms", sa.Double(), nullable=True))
    for name in SEGMENTS:
        op.add_column("journal_segments", sa.Column(name, sa.Double(), nullable=False, server_default="0"))
    op.add_column("journal_segments", sa.Column("hashed_bytes", sa.Integer(), nullable=False, server_default="0"))
    rename("cut_budget", "snapshot_cost")


def downgrade() -> None:
    rename("snapshot_cost", "cut_budget")
    with op.batch_alter_table("journal_segments", schema=None) as batch_op:
        for name in (*SEGMENTS, "hashed_bytes"):
            batch_op.drop_column(name)
    with op.batch_alter_table("recoveries", schema=None) as batch_op:
        batch_op.drop_column("expected_ms")
