"""What is special about each server that people run: one module per kind, and nothing elsewhere.

A server is asked once what it is (:mod:`.recognition`). Its kind (:mod:`.kind`) says the rest, as
data or as a small function. A server that no module knows is :mod:`.unknown`.
"""
