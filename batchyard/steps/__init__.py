"""The steps of a batch: create, fetch, prepare, collect, publish, retry. No Prefect here."""
