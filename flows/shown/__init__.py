"""What people see of a batch in Prefect: pages, progress, reports and artifacts."""
