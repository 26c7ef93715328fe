"""Background responses, the batches that hold them, and notifications of their ends."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

# Only adds. Older code takes batches of responses for their tenant's own, and cannot send the
# events of responses, which a newer process does later.
oldest_code = "0012"


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("completion_window", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.Column("token_estimate", sa.BigInteger(), nullable=False),
        sa.Column("batch_id", sa.String(), nullable=True),
        sa.Column("given", sa.LargeBinary(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("line", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_responses_batch_id"),
        sa.PrimaryKeyConstraint("id", name="pk_responses"),
    )
    op.create_index("ix_responses_batch_id", "responses", ["batch_id"])
    op.create_index("ix_responses_ended_at", "responses", ["ended_at"])
    op.create_index(
        "ix_responses_open",
        "responses",
        ["tenant", "model", "completion_window"],
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    with op.batch_alter_table("batches") as batches:
        batches.add_column(
            sa.Column("holds_responses", sa.Boolean(), server_default=sa.false(), nullable=False)
        )
    with op.batch_alter_table("files") as files:
        files.add_column(
            sa.Column("holds_responses", sa.Boolean(), server_default=sa.false(), nullable=False)
        )
    with op.batch_alter_table("deliveries") as deliveries:
        deliveries.add_column(sa.Column("response_id", sa.String(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("deliveries") as deliveries:
        deliveries.drop_column("response_id")
    with op.batch_alter_table("files") as files:
        files.drop_column("holds_responses")
    with op.batch_alter_table("batches") as batches:
        batches.drop_column("holds_responses")
    op.drop_index("ix_responses_open", table_name="responses")
    op.drop_index("ix_responses_ended_at", table_name="responses")
    op.drop_index("ix_responses_batch_id", table_name="responses")
    op.drop_table("responses")
