"""Who is notified of a batch's end, one row for each channel.

The sealed URLs of webhooks move as they are: no key is needed.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "batch_receivers",
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("destination", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"],
            ["batches.id"],
            name="fk_batch_receivers_batch_id",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("batch_id", "kind", name="pk_batch_receivers"),
    )
    op.execute(
        "INSERT INTO batch_receivers (batch_id, kind, destination) "
        "SELECT id, 'webhook', webhook_location FROM batches WHERE webhook_location IS NOT NULL"
    )
    with op.batch_alter_table("batches") as batches:
        batches.drop_column("webhook_location")


def downgrade() -> None:
    with op.batch_alter_table("batches") as batches:
        batches.add_column(sa.Column("webhook_location", sa.Text(), nullable=True))
    op.execute(
        "UPDATE batches SET webhook_location = (SELECT destination FROM batch_receivers "
        "WHERE batch_id = batches.id AND kind = 'webhook')"
    )
    op.drop_table("batch_receivers")
