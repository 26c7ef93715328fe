"""The tables that several aggregates read, and SQL over them. No aggregate is imported here."""
