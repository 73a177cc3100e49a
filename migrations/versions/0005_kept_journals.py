"""Journals kept at cuts

Revision: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kept_cuts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("process_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("journal_from", sa.Integer(), nullable=True),
        sa.Column("manifest", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["process_id"], ["processes.id"], name=op.f("fk_kept_cuts_process_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_kept_cuts")),
        sa.UniqueConstraint("process_id", "number", name=op.f("uq_kept_cuts_process_id_number")),
    )
    op.create_index(op.f("ix_kept_cuts_at"), "kept_cuts", ["at"])
    op.create_table(
        "kept_parts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kept_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("stored_bytes", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["kept_id"], ["kept_cuts.id"], name=op.f("fk_kept_parts_kept_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_kept_parts")),
    )
    op.create_index(op.f("ix_kept_parts_kept_id"), "kept_parts", ["kept_id"])
    op.create_index(op.f("ix_kept_parts_hash"), "kept_parts", ["hash"])


def downgrade() -> None:
    op.drop_table("kept_parts")
    op.drop_table("kept_cuts")
