"""From a method and a path to the endpoint that answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from .messages import Request, Response
from .store import HubError

if TYPE_CHECKING:
    from .server import Hub

Endpoint = Callable[..., Response]
ROUTES: list[tuple[str, re.Pattern[str], Endpoint]] = []
NAMES = {"repo": r"[^/]+/[^/]+", "revision": r"[^/]+", "path": r".+", "oid": r"[0-9a-f]{64}", "number": r"\d+"}


def route(method: str, path: str) -> Callable[[Endpoint], Endpoint]:
    """Register an endpoint; {names} in the path become arguments."""

    def register(endpoint: Endpoint) -> Endpoint:
        pattern = re.sub(r"\{(\w+)\}", lambda m: f"(?P<{m[1]}>{NAMES[m[1]]})", path.replace(".", r"\."))
        ROUTES.append((method, re.compile(pattern), endpoint))
        return endpoint

    return register


def answer(hub: Hub, request: Request) -> Response:
    """Call the first endpoint that matches; a HEAD is a GET whose body is not sent."""
    method = "GET" if request.method == "HEAD" else request.method
    for wanted, pattern, endpoint in ROUTES:
        if method == wanted and (match := pattern.fullmatch(request.path)):
            return endpoint(hub, request, **match.groupdict())
    raise HubError(404, f"no endpoint {request.method} {request.path}")
