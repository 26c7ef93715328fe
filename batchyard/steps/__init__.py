"""The steps of a batch: create, fetch, prepare, collect, publish, retry. One file each, no Prefect."""
