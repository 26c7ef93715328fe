"""``/metrics`` of a worker: a small process that reads what the worker's flow runs publish.

It also passes on the metrics of each engine that runs here. Nothing waits for this process, and
nothing but the page is lost if it ends.
"""
