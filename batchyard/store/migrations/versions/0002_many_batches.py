"""Many batches at once: leases on batches, tenants with quotas, named leases, measured rates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_COUNTERS = ("epoch", "token_estimate")


def upgrade() -> None:
    with op.batch_alter_table("batches") as table:
        table.add_column(sa.Column("epoch", sa.Integer(), nullable=False, server_default="0"))
        table.add_column(sa.Column("owner", sa.String(), nullable=True))
        table.add_column(sa.Column("lease_expires_at", sa.Double(), nullable=True))
        table.add_column(
            sa.Column("token_estimate", sa.BigInteger(), nullable=False, server_default="0")
        )
        for name in ("paused_at", "eta_at", "at_risk_at"):
            table.add_column(sa.Column(name, sa.BigInteger(), nullable=True))
        table.add_column(sa.Column("retry_of", sa.String(), nullable=True))
    with op.batch_alter_table("batches") as table:
        # The default was for the rows that were there; the models have none.
        for name in _COUNTERS:
            table.alter_column(name, server_default=None)
    op.create_index("ix_batches_tenant_status", "batches", ["tenant", "status"])
    _index_open_chunks("batch_id", "index")
    _create_tenants()
    op.create_table(
        "leases",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "rates",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("tokens_per_second", sa.Double(), nullable=True),
        sa.Column("load_seconds", sa.Double(), nullable=True),
        sa.Column("measured_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("model", "pool", name="pk_rates"),
    )
    # Runners live for minutes: those of the version before are gone.
    op.drop_table("runners")
    _create_runners()


def downgrade() -> None:
    for table in ("runners", "rates", "leases", "tenants"):
        op.drop_table(table)
    _index_open_chunks("model", "batch_id", "index")
    op.drop_index("ix_batches_tenant_status", "batches")
    with op.batch_alter_table("batches") as batches:
        for name in (
            *_COUNTERS,
            *("owner", "lease_expires_at", "paused_at", "eta_at", "at_risk_at", "retry_of"),
        ):
            batches.drop_column(name)
    op.create_table(
        "runners",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("flow_run_id", sa.String(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runners"),
    )
    op.create_index(
        "ix_runners_model_status_heartbeat_at", "runners", ["model", "status", "heartbeat_at"]
    )


def _index_open_chunks(*columns: str) -> None:
    op.drop_index("ix_chunks_open", "chunks")
    is_open = sa.text("status != 'done'")
    op.create_index(
        "ix_chunks_open", "chunks", columns, sqlite_where=is_open, postgresql_where=is_open
    )


def _create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("served_at", sa.Double(), nullable=True),
        sa.Column("max_active_batches", sa.BigInteger(), nullable=True),
        sa.Column("max_enqueued_requests", sa.BigInteger(), nullable=True),
        sa.Column("max_enqueued_tokens", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_tenants"),
    )


def _create_runners() -> None:
    op.create_table(
        "runners",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=True),
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("flow_run_id", sa.String(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ready_at", sa.Double(), nullable=True),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runners"),
    )
    op.create_index("ix_runners_status_kind", "runners", ["status", "kind"])
