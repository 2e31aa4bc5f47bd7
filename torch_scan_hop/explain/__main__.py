"""``python -m torch_scan_hop.explain module:function --device cuda``.

``function`` takes nothing and returns what :func:`torch_scan_hop.explain` is given: ``(combine_fn,
init, xs)``. With ``--device`` it makes fakes: they have shapes and no memory, and a device that is
not there will do.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_scan_hop._torch.fakes import FakeTensorMode
from torch_scan_hop.explain import explain
from torch_scan_hop.explain.device import as_if_there


def main(arguments: Sequence[str] | None = None) -> str:
    """Return the text to print; raise SystemExit for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_scan_hop.explain",
        description="Say what becomes of a scan: kernels, launches, and what stands in the way.",
    )
    parser.add_argument(
        "function",
        help="module:function, or file.py:function, that returns (combine_fn, init, xs)",
    )
    parser.add_argument(
        "--device",
        help="where the function makes its tensors, as fakes: cuda needs neither a GPU nor a build "
        "of torch for CUDA",
    )
    parser.add_argument(
        "--no-kernels", action="store_true", help="do not ask Inductor, which takes seconds"
    )
    given = parser.parse_args(arguments)
    try:
        function = _function(given.function)
        with _fakes_on(given.device):
            case = function()
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    if not isinstance(case, tuple) or len(case) < 2 or not callable(case[0]):
        parser.error(f"{given.function} must return (combine_fn, init, xs), but returned {case!r}")
    return str(explain(*case, kernels=not given.no_kernels))


def _function(name: str) -> Callable[[], Any]:
    module, _, attribute = name.rpartition(":")
    if not module:
        raise ValueError(f"expected module:function, but got {name!r}")
    found = _module_of(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    return getattr(found, attribute)  # type: ignore[no-any-return]


def _module_of(file: Path) -> Any:
    """Import the file as a module, by a name that Dynamo can import, too."""
    name = f"_explained_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _fakes_on(device: str | None) -> Iterator[None]:
    """Make all tensors fakes on ``device``, if one is named."""
    if device is None:
        yield
        return
    with as_if_there(torch.device(device).type), FakeTensorMode(), torch.device(device):
        yield


if __name__ == "__main__":
    print(main())
