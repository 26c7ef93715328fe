"""llama-cpp-python's server on a library that finds its kernels only when it is told to."""

from __future__ import annotations

import ctypes
import os
import runpy
from pathlib import Path

folder = Path(os.environ["LLAMA_CPP_LIB_PATH"])
library = ctypes.CDLL(str(folder / "libggml.so"), mode=ctypes.RTLD_GLOBAL)
library.ggml_backend_load_all_from_path(str(folder).encode())
runpy.run_module("llama_cpp.server", run_name="__main__")
