"""Ways of computing that take turns, tables of figures, and the memory of a process."""

import contextlib
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

Row = dict[str, float]


def in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each way, by round. Others on the machine count for little; a first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, act in ways.items():
            began = time.process_time()
            act()
            seconds[name].append(time.process_time() - began)
    return {name: each[1:] for name, each in seconds.items()}


def show_beside(seconds: dict[str, list[float]]) -> None:
    """Print the medians of in_turns, and the ratios to the first way."""
    first = next(iter(seconds))
    for name, each in seconds.items():
        ratios = [one / other for one, other in zip(each, seconds[first])]
        spread = f"{statistics.median(ratios):.3f} of {first} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:12}{statistics.median(each):8.3f} s of processor time, {spread}", flush=True)


def show(title: str, rows: list[Row]) -> None:
    """Print a table, and the exponent of each column's growth from the first row to the last."""
    names = list(rows[0])
    print(f"\n{title}\n\n| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for row in rows:
        print("|", " | ".join(f"{row[name]:,.{4 if row[name] < 1e4 else 12}g}" for name in names), "|")
    first, last = rows[0], rows[-1]
    if factor := math.log(last[names[0]] / first[names[0]]):
        grown = [f"{math.log(last[n] / first[n]) / factor:.1f}" if first[n] and last[n] else "" for n in names[1:]]
        print("| *growth* |", " | ".join(grown), "|")
    sys.stdout.flush()


def in_a_process(act: Callable[..., object], *args: object) -> object:
    """The value of a function in a process of its own, whose memory holds nothing that another one read or made."""
    context = get_context("fork")
    answers = context.Queue()
    process = context.Process(target=lambda: answers.put(act(*args)))
    process.start()
    found = answers.get(timeout=3600)
    process.join()
    return found


def anonymous_bytes() -> int:
    """The memory of this process that is not of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextlib.contextmanager
def largest_anonymous() -> Iterator[list[int]]:
    """The largest anonymous_bytes(), looked at every few milliseconds."""
    largest, over = [anonymous_bytes()], threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            largest[0] = max(largest[0], anonymous_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield largest
    finally:
        over.set()
        thread.join()
