"""Collect garbage less often in the processes that tests start: that is a quarter of their imports.

Python runs this at its start because the folder is in ``PYTHONPATH``; see ``tests/conftest.py``.
"""

import gc

gc.set_threshold(5_000, 20, 20)
