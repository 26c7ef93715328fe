"""The way from the user's place to an input file in the object store."""
