"""The order of the schedule as SQL: what may be leased now."""
