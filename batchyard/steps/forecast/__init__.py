"""How long a batch will take."""
