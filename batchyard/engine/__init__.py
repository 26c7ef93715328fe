"""Inference: requests in, answers out, as they finish.

==================  ============================================================================
``base``            the Engine Protocol; ``vllm``, ``remote`` and ``stub`` implement it
``vllm_options``    what we add to the engine's command line and environment
``engine_log``      the progress and errors of a start, from the engine's own log
``guarded_process`` a child that ends with us; the process ``guardian`` ensures that
``line_client``     our side of the line stream
``middleware``      the engine's: ``line_stream``, and ``direct_routes``, from there to a handler
``fan_out``         one coroutine per request, for the engines without a line stream
==================  ============================================================================

Nothing here knows batches, chunks or retries.
"""
