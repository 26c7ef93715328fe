"""``python -m batchyard.metrics.exporter OPTIONS``, started by `batchyard worker`."""

from __future__ import annotations

import sys

import msgspec

from batchyard.metrics.exporter.server import ExporterOptions, run_exporter

if __name__ == "__main__":
    run_exporter(msgspec.json.decode(sys.argv[1], type=ExporterOptions))
