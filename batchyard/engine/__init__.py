"""Inference: requests in, answers out, as they finish.

==================  ============================================================================
``base``            the Engine Protocol; ``vllm``, ``remote`` and ``stub`` fulfil it
``vllm_options``    what we add to the engine's command line and environment
``engine_log``      what the engine's own log says of its start
``guarded_process`` a child that cannot outlive us; ``guardian`` is the process that sees to it
``line_client``     our side of the line stream
``middleware``      the engine's: ``line_stream``, and ``direct_routes``, from there to a handler
``fan_out``         one coroutine per request, for the engines without a line stream
==================  ============================================================================

Nothing here knows batches, chunks or retries.
"""
