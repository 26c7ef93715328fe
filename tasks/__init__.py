"""RETRY: one step of a batch's life per file, each one core call. Ids in, counts out.

What a step does is in ``batchyard.steps``; here is only its name in the UI and how it is retried.
"""
