#!/usr/bin/env bash
# As the official image: makes the cluster, POSTGRES_DB and what is in initdb.d when the volume is
# new, with a server that nobody else can reach; passwords are asked for over the network.
set -euo pipefail
bin=$(echo /usr/lib/postgresql/*/bin)
PATH=$bin:$PATH

if [[ $(id -u) == 0 ]]; then
    chown postgres: "$PGDATA"
    exec setpriv --reuid postgres --regid postgres --clear-groups bash "$0"
fi
if [[ ! -s $PGDATA/PG_VERSION ]]; then
    initdb --username "$POSTGRES_USER" --pwfile <(printf %s "$POSTGRES_PASSWORD") \
        --auth-local trust --auth-host scram-sha-256 --encoding UTF8 --no-locale
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    pg_ctl --wait --options "-c listen_addresses='' -k /var/run/postgresql" start
    createdb --username "$POSTGRES_USER" "$POSTGRES_DB"
    for file in /docker-entrypoint-initdb.d/*.sql; do
        psql --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" --file "$file"
    done
    pg_ctl --wait --mode fast stop
fi
exec postgres -c "listen_addresses=*" -k /var/run/postgresql
