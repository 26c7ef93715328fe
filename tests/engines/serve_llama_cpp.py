"""llama.cpp's own server, as xllamacpp has it compiled: ``python serve_llama_cpp.py FILE PORT``."""

from __future__ import annotations

import sys
import threading

import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.model_alias = {"tiny-chat"}
parameters.hostname, parameters.port = "127.0.0.1", int(sys.argv[2])
parameters.n_parallel, parameters.n_ctx = 2, 4096
parameters.endpoint_metrics = True
server = xllamacpp.Server(parameters)
threading.Event().wait()
