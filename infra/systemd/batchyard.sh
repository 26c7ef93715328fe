#!/bin/sh
# The command `batchyard` for root, with the variables of the units and as their user.
# Installed as /usr/local/bin/batchyard: docs/deploy/several-machines.md
set -eu

# What only this machine has. Of several pools, none is the one that is meant.
read_if_one() {
    if [ $# -eq 1 ] && [ -f "$1" ]; then
        . "$1"
    fi
}

# `batchyard migrate` may need the URL of another user than the one in the file.
given=${BATCHYARD_DATABASE_URL-}
set -a
. /etc/batchyard/environment
read_if_one /etc/batchyard/gpu-*
set +a
if [ -n "$given" ]; then
    export BATCHYARD_DATABASE_URL="$given"
elif [ -z "${BATCHYARD_DATABASE_URL-}" ]; then
    # An empty one would win over database_url in batchyard.toml.
    unset BATCHYARD_DATABASE_URL
fi
export BATCHYARD_HOME=/var/lib/batchyard PREFECT_HOME=/var/lib/batchyard/prefect
export BATCHYARD_CONFIG=/etc/batchyard/batchyard.toml
# Prefect looks for files in the working folder, and fails where it may not enter it.
if ! runuser -u batchyard -- test -x "$PWD"; then
    cd /var/lib/batchyard
fi
exec runuser -u batchyard -- /opt/batchyard/bin/batchyard "$@"
