"""The templates of batches whose input is a dataset."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

# Only adds. Older code takes the dataset for a file of requests: its batch fails in validation.
oldest_code = "0012"


def upgrade() -> None:
    op.add_column("batches", sa.Column("template", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("batches", "template")
