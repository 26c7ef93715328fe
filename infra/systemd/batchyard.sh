#!/bin/sh
# The command `batchyard` for root, with the variables of the units and as their user.
# Installed as /usr/local/bin/batchyard: docs/deploy/several-machines.md
set -eu

# `batchyard migrate` may need the URL of another user than the one in the file.
given=${BATCHYARD_DATABASE_URL-}
set -a
. /etc/batchyard/environment
set +a
export BATCHYARD_DATABASE_URL="${given:-${BATCHYARD_DATABASE_URL-}}"
export BATCHYARD_HOME=/var/lib/batchyard PREFECT_HOME=/var/lib/batchyard/prefect
export BATCHYARD_CONFIG=/etc/batchyard/batchyard.toml
exec runuser -u batchyard -- /opt/batchyard/bin/batchyard "$@"
