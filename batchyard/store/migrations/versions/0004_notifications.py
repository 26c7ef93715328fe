"""Who is notified of a batch's end: endpoints, the outbox and its log; each status of a batch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("tenants") as tenants:
        tenants.add_column(sa.Column("notify_email", sa.String(), nullable=True))
        tenants.add_column(sa.Column("webhook_secret", sa.Text(), nullable=True))
        tenants.add_column(sa.Column("old_webhook_secret", sa.Text(), nullable=True))
        tenants.add_column(
            sa.Column("old_webhook_secret_expires_at", sa.BigInteger(), nullable=True)
        )
    _create_webhook_endpoints()
    _create_deliveries()
    _create_delivery_attempts()
    _create_status_changes()


def downgrade() -> None:
    for table in ("status_changes", "delivery_attempts", "deliveries", "webhook_endpoints"):
        op.drop_table(table)
    with op.batch_alter_table("tenants") as tenants:
        for name in (
            "notify_email",
            "webhook_secret",
            "old_webhook_secret",
            "old_webhook_secret_expires_at",
        ):
            tenants.drop_column(name)


def _create_webhook_endpoints() -> None:
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("event_types", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("secret_hint", sa.String(), nullable=False),
        sa.Column("old_secret", sa.Text(), nullable=True),
        sa.Column("old_secret_expires_at", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("disabled_at", sa.BigInteger(), nullable=True),
        sa.Column("disabled_reason", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_endpoints"),
    )
    op.create_index(
        "ix_webhook_endpoints_tenant_created_at_id",
        "webhook_endpoints",
        ["tenant", "created_at", "id"],
    )


def _create_deliveries() -> None:
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("event_id", sa.String(), nullable=False),
        sa.Column("event_type", sa.String(), nullable=False),
        sa.Column("event_at", sa.BigInteger(), nullable=False),
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("endpoint_id", sa.String(), nullable=True),
        sa.Column("recipient", sa.String(), nullable=True),
        sa.Column("about_delivery_id", sa.String(), nullable=True),
        sa.Column("destination", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("lease_expires_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_deliveries"),
    )
    op.create_index("ix_deliveries_status_due_at", "deliveries", ["status", "due_at"])
    op.create_index("ix_deliveries_owner", "deliveries", ["owner"])
    op.create_index("ix_deliveries_batch_id", "deliveries", ["batch_id"])
    op.create_index("ix_deliveries_endpoint_id_status", "deliveries", ["endpoint_id", "status"])
    op.create_index(
        "ix_deliveries_tenant_created_at_id", "deliveries", ["tenant", "created_at", "id"]
    )


def _create_delivery_attempts() -> None:
    op.create_table(
        "delivery_attempts",
        sa.Column("delivery_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.Integer(), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("delivery_id", "number", name="pk_delivery_attempts"),
        sa.ForeignKeyConstraint(
            ["delivery_id"],
            ["deliveries.id"],
            name="fk_delivery_attempts_delivery_id",
            ondelete="CASCADE",
        ),
    )


def _create_status_changes() -> None:
    op.create_table(
        "status_changes",
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "status", name="pk_status_changes"),
    )
    op.create_index("ix_status_changes_at", "status_changes", ["at"])
