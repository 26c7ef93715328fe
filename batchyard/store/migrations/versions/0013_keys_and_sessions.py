"""What a key allows, when it ends, and sessions of browsers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

# Only adds. Older code takes a key for one that may do everything in its tenant and has no end.
oldest_code = "0012"


def upgrade() -> None:
    with op.batch_alter_table("api_keys") as keys:
        keys.add_column(
            sa.Column("is_operator", sa.Boolean(), server_default=sa.false(), nullable=False)
        )
        keys.add_column(
            sa.Column("may_write", sa.Boolean(), server_default=sa.true(), nullable=False)
        )
        keys.add_column(sa.Column("expires_at", sa.BigInteger(), nullable=True))
    op.create_table(
        "sessions",
        sa.Column("token_hash", sa.String(), nullable=False),
        sa.Column("is_code", sa.Boolean(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("is_operator", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("token_hash", name="pk_sessions"),
    )
    op.create_index("ix_sessions_expires_at", "sessions", ["expires_at"])


def downgrade() -> None:
    op.drop_index("ix_sessions_expires_at", "sessions")
    op.drop_table("sessions")
    with op.batch_alter_table("api_keys") as keys:
        for name in ("expires_at", "may_write", "is_operator"):
            keys.drop_column(name)
