"""``python -m batchyard.cli``, where the ``batchyard`` command is not on the path."""

from batchyard.cli import main

main()
