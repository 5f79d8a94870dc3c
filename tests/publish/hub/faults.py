"""What goes wrong, and on which request."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from .messages import Request, Response

KINDS = ("status", "drop", "cut", "short", "flip")


@dataclass
class Fault:
    """One fault, on the requests from the `first` to the last of `times` that match.

    Args:
        method: of the request; a HEAD is not a GET.
        path: regular expression that the path must contain.
        kind: "status": answered with `status` and nothing is done; "drop": the connection is closed in the middle of
            the request's body; "cut": the same in the middle of the answer's; "short": half of the answer, announced
            as the whole; "flip": one bit of the answer is wrong.
        status: of the answer.
        first: which match is the first to fail, counted from 1.
        times: how many fail; None for all.
    """

    method: str
    path: str
    kind: str = "status"
    status: int = 500
    first: int = 1
    times: int | None = 1
    matches: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        assert self.kind in KINDS

    def strikes(self, method: str, path: str) -> bool:
        """Whether this request fails; counts it."""
        if method != self.method or not re.search(self.path, path):
            return False
        self.matches += 1
        return self.matches >= self.first and (self.times is None or self.matches < self.first + self.times)

    def spoil(self, request: Request, response: Response) -> Response:
        """The answer as this fault leaves it."""
        if self.kind == "short" and request.method == "GET":
            return replace(response, body=response.body[: len(response.body) // 2])
        if self.kind == "cut" and request.method == "GET":
            return replace(response, cut=len(response.body) // 2)
        if self.kind == "flip" and response.body:
            last = bytes([response.body[-1] ^ 1])
            return replace(response, body=response.body[:-1] + last)
        return response
