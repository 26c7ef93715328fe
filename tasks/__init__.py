"""RETRY: one step per file. Not Prefect's `@task`, which costs 2.5 times as much (ADR 74).

Each step is one core call: ids in, counts out.

What a step does is in ``batchyard.steps``; here is only its name in the UI and how it is retried.
"""
