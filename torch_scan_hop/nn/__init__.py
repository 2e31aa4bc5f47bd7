"""Recurrent layers, as compositions of :func:`torch_scan_hop.scan`.

``Recurrent``, ``Bidirectional``, ``Stack``  any cell, over time
``LSTM``, ``GRU``, ``RNN``, ``convert``       torch.nn's, with its arguments, parameters and errors
``LayerNormLSTMCell``                         a cell that torch.nn has not
"""

from __future__ import annotations

from torch_scan_hop.nn.cells import LayerNormLSTMCell
from torch_scan_hop.nn.like_torch import GRU, LSTM, RNN, convert
from torch_scan_hop.nn.recurrent import Bidirectional, Recurrent, Stack

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Bidirectional",
    "LayerNormLSTMCell",
    "Recurrent",
    "Stack",
    "convert",
]
