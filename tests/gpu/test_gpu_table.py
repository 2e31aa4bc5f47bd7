"""What each cell becomes on a GPU is what ``gpu_table.txt`` says (``python tests/gpu_table.py``)."""

from __future__ import annotations

import pytest
import torch
from gpu_table import ROWS, read, row

from torch_scan_hop._torch.absent_gpu import why_not_here

cuda = pytest.mark.skipif(bool(why_not_here()), reason="nothing stands in for a GPU on this torch")

#: of these each loop is one kernel
ONE_KERNEL = (
    *("torch.nn: RNNCell", "torch.nn: GRUCell", "torch.nn: LSTMCell", "torch.nn: LSTMCell, bf16"),
    *("torch.nn: LSTMCell, then LayerNorm", "torch.nn: LSTM, LayerNorm of its gates"),
    *("torch.nn: GRUCell, one row", "torch.nn: GRUCell, log_softmax of 7 classes"),
    *("torch.nn: GRUCells, states of one tensor", "torch.nn: LSTMCell, states of one tensor"),
    *("kernels: layers", "kernels: packed", "kernels: averages in one"),
    *("torch.nn: an average with its bias corrected", "kernels: rnn with a head"),
    *("torch.nn: sLSTM", "torch.nn: LayerNorm", "torch.nn: RMSNorm", "torch.nn: softmax"),
    *("cookbook: own_cell", "cookbook: own_rnn", "cookbook: recurrent_policy"),
    *("cells: selective_ssm", "cookbook: lru", "cookbook: gae", "cookbook: kalman"),
    *("kernels: hidden markov", "kernels: chain of tags", "kernels: 32 states"),
    *("torch.nn: Dropout", "torch.nn: LSTMCell between dropouts"),
    *("cookbook: spiking_net", "cookbook: selective_ssm", "cookbook: delta_net"),
)


def test_the_table_has_each_cell():
    assert [*read()] == ROWS


def test_what_is_written_first_is_one_kernel_each_way():
    table = read()
    for name in ONE_KERNEL:
        loops = [line.rpartition(": ")[2] for line in table[name].splitlines()]
        assert len(loops) >= 2 and all(loop.startswith("one Triton kernel") for loop in loops)


FIRST = (
    *("torch.nn: GRUCell", "torch.nn: LSTMCell, bf16", "torch.nn: GRUCell, one row"),
    *("torch.nn: GRUCell, log_softmax of 7 classes", "torch.nn: GRUCells, states of one tensor"),
)


@cuda
@pytest.mark.torch_version
@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]
)
def test_a_row(name):
    if torch.__version__ < "2.15" and name not in FIRST:
        pytest.skip("the table is of the newest torch: others decompose otherwise")
    assert row(name) == read()[name]
