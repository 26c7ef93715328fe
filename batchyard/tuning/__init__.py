"""Which options of an engine suit its work: what to try next, when to stop, what to keep. Pure.

The work itself is the probe. The engine's speed is measured with its own options, then with one
other option at a time, as long as that may gain anything with work of this shape, and as long as
what is left of the work is many times what the restarts cost.
"""
