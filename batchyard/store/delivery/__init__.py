"""The outbox: what is to be sent to whom, and how each attempt went."""
