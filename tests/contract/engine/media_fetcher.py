"""What vLLM fetches under an engine's command line: run by the engine environment's Python.

Usage: ``python media_fetcher.py URLS WORD...``, with the URLs as a JSON list and the words that
``vllm serve`` would get. It ends well if the last URL, and no other, gives a picture.
"""

from __future__ import annotations

import json
import sys

from vllm.multimodal.media import MediaConnector
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # before vLLM 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser


def fetch(urls: list[str], words: list[str]) -> None:
    """Through the class that chat requests go through, made as they make it."""
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    connector = MediaConnector(
        media_io_kwargs=options.media_io_kwargs,
        allowed_local_media_path=options.allowed_local_media_path,
        allowed_media_domains=options.allowed_media_domains,
    )
    *refused, good = urls
    for url in refused:
        try:
            connector.fetch_image(url)
        except Exception as error:  # noqa: BLE001 - whichever it is, there is no picture
            print(url, type(error).__name__)  # noqa: T201 - for whoever reads a failed test
        else:
            sys.exit(f"{url} gave a picture")
    connector.fetch_image(good)


if __name__ == "__main__":
    fetch(json.loads(sys.argv[1]), sys.argv[2:])
