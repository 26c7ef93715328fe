"""The database, without any of our tables: engines, transactions, clocks, leases, migrations."""
