"""Serve a page from a command: check for the extra `web`, print the address, and stop on Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from redline.core.errors import UserError

if TYPE_CHECKING:
    from redline.web.serve import Page


@contextmanager
def web_extra(command: str) -> Iterator[None]:
    """Turn a missing dependency of the page into a UserError that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "websockets"):
            raise
        raise UserError(f"{command} needs {error.name}; install it with pip install 'redline[web]'.") from error


def check_port(port: int | None) -> None:
    """Raise UserError for an invalid port number."""
    if port is not None and not 0 <= port <= 65535:
        raise UserError(f"port is {port}; expected 0 (any free one) to 65535.")


def serve_page(page: Page, host: str, port: int | None, json: bool) -> int:
    """Serve until Ctrl-C. Print the address to standard output, as a JSON object if `json`. Return the exit code."""
    from redline.web.serve import serve

    def say(address: str) -> None:
        if json:
            print(f'{{"address": "{address}"}}', flush=True)
        else:
            print(f"Open {address} in a browser; Ctrl-C ends it.", flush=True)

    try:
        serve(page, host, port, say)
    finally:
        page.close()
    print("The page is closed.", file=sys.stderr)
    return 0
