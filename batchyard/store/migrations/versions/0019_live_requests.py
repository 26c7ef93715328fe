"""Where live requests are taken, how many a tenant may have, and what they used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

# Only adds. Older code takes usage of live requests for that of batches.
oldest_code = "0012"


def upgrade() -> None:
    op.create_table(
        "live_engines",
        sa.Column("runner_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("runner_id", name="pk_live_engines"),
    )
    with op.batch_alter_table("tenants") as tenants:
        tenants.add_column(sa.Column("max_live_requests", sa.BigInteger(), nullable=True))
    with op.batch_alter_table("usage") as usage:
        usage.add_column(
            sa.Column("is_live", sa.Boolean(), server_default=sa.false(), nullable=False)
        )


def downgrade() -> None:
    with op.batch_alter_table("usage") as usage:
        usage.drop_column("is_live")
    with op.batch_alter_table("tenants") as tenants:
        tenants.drop_column("max_live_requests")
    op.drop_table("live_engines")
