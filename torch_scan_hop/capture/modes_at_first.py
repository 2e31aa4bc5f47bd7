"""First steps on their own under a TorchFunctionMode of the user's: they are refused."""

from __future__ import annotations

from typing import Any

from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.function_modes import users_function_mode


def refuse_modes(tx: Any, why: Exception) -> None:
    """Raise if such a mode is active; ``why`` says in what the first step differs.

    The trace of a first step holds what the mode has made of it. But torch runs what Dynamo
    captures under the modes of the call, and there the mode would change that step once more. The
    body of a scan is safe: no mode sees what the operator runs. A default device changes nothing
    when it is met again.
    """
    if mode := users_function_mode(tx):
        raise Unsupported(
            f"the first step differs from the others, and {mode} is active, a TorchFunctionMode. "
            "Give init what the later steps have, or call the scan outside of the mode"
        ) from why
