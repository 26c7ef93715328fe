"""Inference: requests in, answers out, as they finish.

===================  =========================================================================
``base``             the Engine Protocol; ``vllm``, ``remote`` and ``stub`` implement it
``vllm``             vLLM as a child process: its options, its log, our side of the line stream
``remote``           a server that runs already: its address, its models, a coroutine per request
``stub``             an engine without a model, for tests and trials
``middleware``       the engine's side: ``line_stream``, and ``direct_routes`` to a handler
``sharing``          how many requests batches may have in an engine that others use as well
``prompt_counting``  counts tokens and checks bodies in vLLM's own environment
===================  =========================================================================

Nothing here knows batches, chunks or retries.
"""
