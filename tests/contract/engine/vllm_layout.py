"""What our code relies on in the vLLM of an environment: run by that environment's Python.

It prints a JSON object: ``direct``, the paths that ``direct_routes`` takes to their handlers, each
with whether it knows the handler without a task of its own; and ``run_batch``, the options of
``vllm run-batch`` that ``vllm serve`` does not have. The modules are where vLLM 0.32 has them, or
0.33.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm.entrypoints.launchers import run_batch
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common import cli_args
except ImportError:  # before vLLM 0.33
    from vllm.entrypoints.launchers import cli_args

sys.path.insert(0, str(Path(__file__).parents[3] / "batchyard/engine/middleware"))
from direct_routes import DirectRoutes


def direct_routes() -> dict[str, bool]:
    """Of an application for every kind of model, with an engine behind it or not."""
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    tasks = ("generate", "embed", "classify", "score")
    app = build_app(parser.parse_args([]), tasks)
    found = DirectRoutes(app.build_middleware_stack())._look_up({"app": app})
    return {path: route.in_this_task is not None for path, route in found.items()}


def options_of_run_batch_only() -> set[str]:
    """In any spelling."""
    ours, theirs = (
        {name for action in parser._actions for name in action.option_strings}
        for parser in (
            run_batch.make_arg_parser(FlexibleArgumentParser()),
            cli_args.make_arg_parser(FlexibleArgumentParser()),
        )
    )
    return ours - theirs


if __name__ == "__main__":
    facts = {"direct": direct_routes(), "run_batch": sorted(options_of_run_batch_only())}
    print(json.dumps(facts))  # noqa: T201 - the test reads it
