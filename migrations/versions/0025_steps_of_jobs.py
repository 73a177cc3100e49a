"""How long a step of a job takes, and on how many devices

Revision: 0025
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    "step_devices": sa.Integer(), "step_ms": sa.Double(), "collectives": sa.Double(),
}  # fmt: skip


def upgrade() -> None:
    for name, kind in COLUMNS.items():
        op.add_column("job_profiles", sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("job_profiles") as table:
        for name in COLUMNS:
            table.drop_column(name)
