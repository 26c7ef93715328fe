"""An engine that others use too: what a batch may send to it, and when."""
