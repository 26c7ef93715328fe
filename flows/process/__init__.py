"""What the flows need of their process: its services, its signals, its client of Prefect."""
