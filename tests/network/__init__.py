"""A network that loses, cuts, delays and repeats what passes between real processes."""
