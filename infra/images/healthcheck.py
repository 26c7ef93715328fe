"""HEALTHCHECK of the images: does the server of this container answer?

``python healthcheck.py URL`` ends with 0 if it does. An answer that asks for a key is one too; 5xx
is not. A proxy that the variables name is not used: it cannot reach 127.0.0.1 of this container.
"""

import sys
import urllib.error
import urllib.request

_SECONDS = 8
_SERVER_ERROR = 500


def is_answered(url: str) -> bool:
    """Whether the server at the URL answers and has not failed."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_SECONDS):
            return True
    except urllib.error.HTTPError as refused:
        return refused.code < _SERVER_ERROR
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(not is_answered(sys.argv[1]))
