"""How much of a chunk's work is left, for forecasts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

# Only adds. Older code does not write the share: what it answers of a chunk whose share another
# runner wrote is counted late, in forecasts only.
oldest_code = "0012"


def upgrade() -> None:
    op.add_column("chunks", sa.Column("left_share", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("chunks", "left_share")
