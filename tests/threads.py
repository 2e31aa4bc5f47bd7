"""Work for several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def results_of_threads(work: Callable[[int], Any], n_threads: int) -> list[Any]:
    """``work(k)`` of each thread k, started together; the first error of any is raised."""
    results: list[Any] = [None] * n_threads
    errors: list[BaseException] = []
    start = threading.Barrier(n_threads)

    def run(k: int) -> None:
        try:
            start.wait()
            results[k] = work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
