"""The ``pardist outer-server`` command."""

from __future__ import annotations

import argparse
import logging
import resource
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run the outer server of local-SGD islands until interrupted.

    Args:
        arguments: Arguments after ``pardist outer-server``.

    Returns:
        0 after an interrupt or SIGTERM, 2 if the address does not exist or the port is in use.
    """
    parser = argparse.ArgumentParser(
        "pardist outer-server",
        description="Holds the weights that islands of LocalSGDStrategy(outer_server=...) share, and runs their"
        " outer steps. Each island is a separate job, which may join, fail and rejoin at any time. Any"
        " host that can reach the port can take part: listen only on a network that the islands alone"
        " can reach.",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all addresses of this host"
    )
    parser.add_argument("--port", type=int, default=29400)
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=60.0,
        help="seconds after the first island's differences at which the outer step runs without late islands",
    )
    found = parser.parse_args(list(arguments))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)

    from lightning_pardist.engines.averaging import OuterServer

    # Every rank holds one connection.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        server = OuterServer(found.host, found.port, timeout_s=found.timeout)
    except OSError as error:
        print(f"pardist outer-server: cannot listen on {found.host}:{found.port} ({error}).", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    host, port = server.address
    print(
        f"outer server at {host}:{port}, each round ends at most {found.timeout:g} s after its first island", flush=True
    )
    try:
        server.serve()
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        server.close()
    return 0


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
