"""Which code may use the tables, and whether the object store is ahead of the database."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

# Older code does not look for it, and refuses these tables.
oldest_code = "0012"


def upgrade() -> None:
    op.create_table(
        "table_version",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("revision", sa.String(), nullable=False),
        sa.Column("oldest_code", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_table_version"),
    )
    op.create_table(
        "storage_mark",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("database", sa.String(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("looked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_storage_mark"),
    )


def downgrade() -> None:
    op.drop_table("storage_mark")
    op.drop_table("table_version")
