"""How commands read their arguments and write to a terminal."""
