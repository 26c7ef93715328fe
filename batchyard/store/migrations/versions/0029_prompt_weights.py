"""What a token of a prompt costs on each model and pool, for forecasts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

# Only adds. Older code writes neither column, and forecasts with a fixed weight.
oldest_code = "0012"


def upgrade() -> None:
    op.add_column("rates", sa.Column("prompt_tokens_per_second", sa.Double(), nullable=True))
    op.add_column("rates", sa.Column("prompt_weight", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("rates", "prompt_weight")
    op.drop_column("rates", "prompt_tokens_per_second")
