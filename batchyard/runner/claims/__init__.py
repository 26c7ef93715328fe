"""Which chunks a runner has, when it gives them back, and what they need of their input."""
