"""Chains: batches with further stages, and the batches that hold lines of these."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

# Only adds. Older code takes a chain for its first stage, and parts for their tenant's own batches.
oldest_code = "0012"


def upgrade() -> None:
    with op.batch_alter_table("batches") as batches:
        batches.add_column(sa.Column("part_of", sa.String(), nullable=True))
        batches.add_column(sa.Column("stages", sa.Integer(), server_default="0", nullable=False))
    op.create_index(
        "ix_batches_part_of",
        "batches",
        ["part_of"],
        sqlite_where=sa.text("part_of IS NOT NULL"),
        postgresql_where=sa.text("part_of IS NOT NULL"),
    )
    op.create_table(
        "chains",
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("stages", sa.Text(), nullable=False),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("is_open", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name="fk_chains_batch_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", name="pk_chains"),
    )
    op.create_table(
        "chain_parts",
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("chain_id", sa.String(), nullable=False),
        sa.Column("stage", sa.Integer(), nullable=False),
        sa.Column("ordinals", sa.LargeBinary(), nullable=False),
        sa.Column("is_drained", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name="fk_chain_parts_batch_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", name="pk_chain_parts"),
    )
    op.create_index("ix_chain_parts_chain_id", "chain_parts", ["chain_id"])


def downgrade() -> None:
    op.drop_index("ix_chain_parts_chain_id", table_name="chain_parts")
    op.drop_table("chain_parts")
    op.drop_table("chains")
    op.drop_index("ix_batches_part_of", table_name="batches")
    with op.batch_alter_table("batches") as batches:
        batches.drop_column("stages")
        batches.drop_column("part_of")
