"""Start the processes of tests with less work: there are hundreds of them.

Python runs this at its start because the folder is in ``PYTHONPATH``; see ``tests/conftest.py``.
"""

import gc
import os
from pathlib import Path

# Looking for garbage among what is imported is a quarter of the imports' processor time.
gc.set_threshold(5_000, 20, 20)

# Each of Prefect's clients reads all authorities that it trusts, in 20 to 50 ms, also to speak HTTP
# without TLS. `batchyard deploy` makes forty clients. One authority is enough here: it has signed
# nothing.
os.environ.setdefault("PREFECT_API_SSL_CERT_FILE", str(Path(__file__).with_name("authority.pem")))
