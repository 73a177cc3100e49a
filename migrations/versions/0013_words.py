"""The vocabulary's words: a snapshot was called a cut, and a replay a redo

Revision: 0013

What is stored on disk of a snapshot is described by a manifest, whose hash is in the database. Manifests of earlier
versions use the former words and are not converted: their rows go. A process that runs is stored again at its next
snapshot.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def stored(snapshots: str, parts: str, parent: str) -> None:
    """The two tables of what is stored, by their names."""
    op.create_table(
        snapshots,
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("process_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("journal_from", sa.Integer(), nullable=True),
        sa.Column("manifest", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["process_id"], ["processes.id"], name=op.f(f"fk_{snapshots}_process_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{snapshots}")),
        sa.UniqueConstraint("process_id", "number", name=op.f(f"uq_{snapshots}_process_id_number")),
    )
    op.create_index(op.f(f"ix_{snapshots}_at"), snapshots, ["at"])
    op.create_table(
        parts,
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column(parent, sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("stored_bytes", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint([parent], [f"{snapshots}.id"], name=op.f(f"fk_{parts}_{parent}"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{parts}")),
    )
    op.create_index(op.f(f"ix_{parts}_{parent}"), parts, [parent])
    op.create_index(op.f(f"ix_{parts}_hash"), parts, ["hash"])


RECOVERIES = {"cut": "snapshot", "redone_ms": "replayed_ms"}


def events(old: str, new: str) -> None:
    """A value of recoveries' events, which are replayed to who asks for earlier ones."""
    op.execute(
        f"UPDATE events SET data = json_remove(json_set(data, '$.{new}', json_extract(data, '$.{old}')), '$.{old}') "
        f"WHERE type = 'recovery' AND json_type(data, '$.{old}') IS NOT NULL"
    )


def upgrade() -> None:
    for old, new in RECOVERIES.items():
        op.execute(f"ALTER TABLE recoveries RENAME COLUMN {old} TO {new}")
    events("redone_ms", "replayed_ms")
    op.drop_table("kept_parts")
    op.drop_table("kept_cuts")
    stored("stored_snapshots", "stored_parts", "snapshot_id")


def downgrade() -> None:
    op.drop_table("stored_parts")
    op.drop_table("stored_snapshots")
    stored("kept_cuts", "kept_parts", "kept_id")
    events("replayed_ms", "redone_ms")
    for old, new in RECOVERIES.items():
        op.execute(f"ALTER TABLE recoveries RENAME COLUMN {new} TO {old}")
