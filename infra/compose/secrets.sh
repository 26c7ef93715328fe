#!/bin/sh
# Makes .env from .env.example, with secrets of its own. It never changes a .env that is there.
set -eu
cd "$(dirname "$0")"

if [ -e .env ]; then
    echo "secrets: .env is there already, and is left as it is." >&2
    exit 1
fi

letters() {
    head -c 512 /dev/urandom | base64 | tr -dc 'A-Za-z0-9' | head -c 40
}

umask 077
sed \
    -e "s|^POSTGRES_PASSWORD=.*|POSTGRES_PASSWORD=$(letters)|" \
    -e "s|^SECRET_KEY=.*|SECRET_KEY=$(head -c 32 /dev/urandom | base64 | tr '+/' '-_')|" \
    -e "s|^PREFECT_LOGIN=.*|PREFECT_LOGIN=batchyard:$(letters)|" \
    -e "s|^S3_SECRET_KEY=.*|S3_SECRET_KEY=$(letters)|" \
    -e "s|^GRAFANA_PASSWORD=.*|GRAFANA_PASSWORD=$(letters)|" \
    .env.example >.env
echo "secrets: .env is made. Only you can read it; keep a copy with your backups."
