"""Whole lives of batches while one exchange with Prefect's server fails.

`make test-slow` runs every cell of the table, `make test-deployed` a few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.network.cells import read_cells
from tests.network.matrix import Matrix, compare
from tests.network.with_prefect import installed_with_prefect

if TYPE_CHECKING:
    from pathlib import Path

CELLS = [cell for cell in read_cells() if cell.connection == "prefect"]
LIVES = sorted({cell.life for cell in CELLS})


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    return Matrix(installed_with_prefect, tmp_path)


@pytest.mark.deployed
async def test_one_fault_of_each_kind_changes_nothing(matrix: Matrix) -> None:
    cells = [cell for cell in CELLS if cell.is_short]
    compare(await matrix.outcomes(cells), cells)


@pytest.mark.slow
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("life", LIVES)
async def test_every_cell_is_as_the_table_says(matrix: Matrix, life: str) -> None:
    cells = [cell for cell in CELLS if cell.life == life]
    compare(await matrix.outcomes(cells), cells)
