"""Whole lives of batches while the network fails once, at each moment and in each way.

`make test-slow` runs every cell of the table, `make test-deployed` one of each kind. The cells of
the connection to Prefect are in :mod:`tests.network.test_prefect_cells`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.network.cells import read_cells
from tests.network.installation import installed
from tests.network.matrix import Matrix, compare
from tests.services.postgres import postgres_for_session

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.storage.bucket import S3Credentials

CELLS = [cell for cell in read_cells() if cell.connection != "prefect"]
LIVES = sorted({cell.life for cell in CELLS})


@pytest.fixture
def matrix(
    request: pytest.FixtureRequest,
    s3: S3Credentials,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Matrix:
    cluster = postgres_for_session(request)
    return Matrix(lambda folder: installed(folder, cluster, s3, monkeypatch), tmp_path)


@pytest.mark.deployed
async def test_one_fault_of_each_kind_changes_nothing(matrix: Matrix) -> None:
    cells = [cell for cell in CELLS if cell.is_short]
    compare(await matrix.outcomes(cells), cells)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("life", LIVES)
async def test_every_cell_is_as_the_table_says(matrix: Matrix, life: str) -> None:
    cells = [cell for cell in CELLS if cell.life == life]
    compare(await matrix.outcomes(cells), cells)
