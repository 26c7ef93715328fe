"""How long answers were, by class; what chunks have of each class; how fast an answer comes."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

# Older code neither writes nor reads them, and plans chunks without them.
oldest_code = "0012"

_COLUMNS: tuple[tuple[str, sa.Column[Any]], ...] = (
    ("batches", sa.Column("length_classes", sa.Text(), nullable=True)),
    ("batches", sa.Column("tail_tokens", sa.Double(), nullable=True)),
    ("chunks", sa.Column("prompt_tokens", sa.BigInteger(), nullable=True)),
    ("chunks", sa.Column("prompt_work", sa.Double(), nullable=True)),
    ("chunks", sa.Column("outputs", sa.Text(), nullable=True)),
    ("chunks", sa.Column("answer_bits", sa.Integer(), nullable=True)),
    ("rates", sa.Column("work_per_second", sa.Double(), nullable=True)),
    ("rates", sa.Column("answer_tokens_per_second", sa.Double(), nullable=True)),
)


def upgrade() -> None:
    op.create_table(
        "lengths",
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("template", sa.String(), nullable=False),
        sa.Column("bucket", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("tokens", sa.Double(), nullable=False),
        sa.Column("histogram", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "tenant", "model", "endpoint", "template", "bucket", name="pk_lengths"
        ),
    )
    for table, column in _COLUMNS:
        op.add_column(table, column)


def downgrade() -> None:
    for table, column in reversed(_COLUMNS):
        op.drop_column(table, column.name)
    op.drop_table("lengths")
