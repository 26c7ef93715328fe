"""Batches and files that their tenant does not see say what they are for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0035"
branch_labels = None
depends_on = None

_FILE_COLUMNS = ("input_file_id", "output_file_id", "error_file_id")


def upgrade() -> None:
    for table in ("batches", "files"):
        op.add_column(table, sa.Column("hidden_for", sa.String(), nullable=True))
    op.execute("UPDATE batches SET hidden_for = 'responses' WHERE holds_responses")
    op.execute("UPDATE batches SET hidden_for = 'chain' WHERE part_of IS NOT NULL")
    # Those of earlier stages are named by no batch.
    op.execute("UPDATE files SET hidden_for = 'chain' WHERE holds_responses")
    for column in _FILE_COLUMNS:
        of_responses = f"SELECT {column} FROM batches WHERE hidden_for = 'responses'"  # noqa: S608 - a constant
        op.execute(f"UPDATE files SET hidden_for = 'responses' WHERE id IN ({of_responses})")  # noqa: S608 - a constant
    for table in ("batches", "files"):
        op.drop_column(table, "holds_responses")


def downgrade() -> None:
    for table in ("batches", "files"):
        op.add_column(
            table,
            sa.Column("holds_responses", sa.Boolean(), server_default=sa.false(), nullable=False),
        )
    op.execute("UPDATE batches SET holds_responses = true WHERE hidden_for = 'responses'")
    op.execute("UPDATE files SET holds_responses = true WHERE hidden_for IS NOT NULL")
    for table in ("batches", "files"):
        op.drop_column(table, "hidden_for")
