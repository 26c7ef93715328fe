"""``python -m batchyard.api``: the OpenAPI document, as ``docs/openapi.json`` has it."""

from __future__ import annotations

import sys

from batchyard.api.app import create_app
from batchyard.api.openapi import document_text

sys.stdout.write(document_text(create_app()))
