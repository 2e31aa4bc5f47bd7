"""Ways to capture graphs, by type of device: torch's CUDA graphs, on CUDA alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_scan_hop._torch.capabilities import why_off

Work = Callable[[], None]


class CudaGraphs:
    """Captures by :class:`torch.cuda.CUDAGraph`."""

    def stream(self, device: torch.device) -> int:
        """Return the stream that work is given to now."""
        return int(torch.cuda.current_stream(device).cuda_stream)

    def is_capturing(self, device: torch.device) -> bool:
        """Return True if anybody is capturing the current stream of ``device``."""
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def capture(self, device: torch.device, work: Work) -> Work:
        """Capture what ``work`` launches; calling the result launches it again."""
        with torch.cuda.device(device):
            graph = torch.cuda.CUDAGraph()
            # torch's own stream for captures is of the device that was captured first; and what
            # other threads do meanwhile (a loader that allocates pinned memory) is no error
            stream = torch.cuda.Stream(device)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                work()
        return graph.replay

    def recover(self, device: torch.device) -> None:
        """After a capture that failed, leave its state, in which the generator still is."""
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())


SERVED = {"cuda": CudaGraphs()}


def graphs_for(device: torch.device) -> CudaGraphs | None:
    return SERVED[device.type] if is_served(device) else None


def is_served(device: torch.device) -> bool:
    return device.type in SERVED and why_off("cuda_graphs") is None
