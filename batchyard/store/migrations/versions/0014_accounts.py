"""What batches used and cost, and what operators did."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

# Only adds. What older code ends meanwhile is not counted.
oldest_code = "0012"

_TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "total_tokens")


def upgrade() -> None:
    with op.batch_alter_table("batches") as batches:
        batches.add_column(sa.Column("cost", sa.BigInteger(), nullable=True))
        batches.add_column(sa.Column("currency", sa.String(), nullable=True))
    op.create_table(
        "usage",
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _TOKENS),
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("engine_seconds", sa.Double(), nullable=True),
        sa.Column("cost", sa.BigInteger(), nullable=True),
        sa.Column("currency", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("batch_id", "model", name="pk_usage"),
    )
    op.create_index("ix_usage_ended_at", "usage", ["ended_at"])
    op.create_index("ix_usage_tenant_ended_at", "usage", ["tenant", "ended_at"])
    op.create_table(
        "audit_log",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
    )
    op.create_index("ix_audit_log_at_id", "audit_log", ["at", "id"])
    _count_what_has_ended()


def _count_what_has_ended() -> None:
    """As it would have been counted at their ends, less the price: there were none then."""
    tokens = ", ".join(_TOKENS)
    op.execute(
        f"INSERT INTO usage (batch_id, model, tenant, endpoint, ended_at, requests, {tokens}) "  # noqa: S608 - our own column names
        "SELECT id, coalesce(model, ''), tenant, endpoint, "
        "coalesce(completed_at, failed_at, expired_at, cancelled_at), "
        f"completed + failed, {tokens} FROM batches "
        "WHERE coalesce(completed_at, failed_at, expired_at, cancelled_at) IS NOT NULL "
        "AND completed + failed > 0"
    )


def downgrade() -> None:
    op.drop_table("audit_log")
    op.drop_table("usage")
    with op.batch_alter_table("batches") as batches:
        batches.drop_column("currency")
        batches.drop_column("cost")
