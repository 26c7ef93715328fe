"""HEALTHCHECK of the images: does the server of this container answer?

``python healthcheck.py URL`` ends with 0 if it does. An answer that asks for a key is one too; 5xx
is not.
"""

import sys
import urllib.error
import urllib.request

_SECONDS = 8
_SERVER_ERROR = 500


def is_answered(url: str) -> bool:
    """Whether the server at the URL answers and has not failed."""
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS):  # noqa: S310 - the operator's own
            return True
    except urllib.error.HTTPError as refused:
        return refused.code < _SERVER_ERROR
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(not is_answered(sys.argv[1]))
