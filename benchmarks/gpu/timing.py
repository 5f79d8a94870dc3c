"""Times a call beside the stock one, by CUDA events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from bench_figures import summary

SLOW = 2.0  # seconds of both calls from which on one round is enough
Task = Callable[[], Callable[[], Any]]  # prepares, and returns what is timed


def seconds(task: Task, device: str) -> float:
    """Seconds of one call, without what prepares it."""
    call = task()
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def beside(kind: str, stock: Task, own: Task, device: str, budget: float) -> dict[str, Any]:
    """The median ratio of the rounds with its interval, the median times, and the time of the first call.

    The first call loads and builds kernels. In each round, both calls run one after the other, in alternate order.
    Calls of seconds are not repeated a third time.

    Args:
        kind: in the names of the figures.
        stock: the call of the stock model.
        own: the other call.
        device: "cuda" or "cpu".
        budget: about how many seconds the rounds may take; there are 1 to 15 of them.
    """
    first = [seconds(task, device) for task in (stock, own)]
    times = {task: [seconds(task, device)] for task in (stock, own)}
    once = sum(map(sum, times.values()))
    if once < SLOW:
        times = {stock: [], own: []}
        for turn in range(int(min(15, max(1, budget / once)))):
            for task in (stock, own) if turn % 2 else (own, stock):
                times[task].append(seconds(task, device))
    figures = summary(kind, times[own], times[stock])
    return {**figures, "stock_ms": 1e3 * median(times[stock]), "first_ms": 1e3 * first[1], "rounds": len(times[own])}
