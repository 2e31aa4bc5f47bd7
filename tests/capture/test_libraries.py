"""Which library makes a product faster is measured once, and kept."""

from __future__ import annotations

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_scan_hop._torch.onednn import has_both_libraries
from torch_scan_hop.inductor.cpu import libraries
from torch_scan_hop.inductor.cpu.libraries import LAYOUTS, layout_of, onednn_is_faster

pytestmark = pytest.mark.skipif(not has_both_libraries(), reason="this torch has one of the two")

SIZES = (64, 256, 512)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(libraries, "compilers_folder", lambda: str(tmp_path))
    return tmp_path


@pytest.fixture
def measured(monkeypatch):
    """What is measured, by the shapes; oneDNN is twice as fast for those of 512 columns."""
    found = []

    def seconds(left, right):
        found.append((*left.shape, right.shape[1], layout_of(left), layout_of(right)))
        return (0.5e-4 if right.shape[1] == 512 else 1e-4), 1e-4

    monkeypatch.setattr(libraries, "_best_seconds", seconds)
    return found


def in_another_process():
    libraries._known.cache_clear()


def test_each_layout_is_known_again():
    for name, made in LAYOUTS.items():
        assert layout_of(made(3, 4)) == name
    # of one row or column, a stride says nothing
    assert layout_of(torch.ones(1, 4)) == layout_of(torch.ones(5, 4)[::5]) == "rows"
    assert layout_of(torch.ones(4, 1)) == layout_of(torch.ones(1, 4).t()) == "rows"
    assert layout_of(torch.ones(4, 1).expand(4, 3)) == "entries apart"


def test_what_was_measured_is_kept_for_other_processes(folder, measured):
    for _ in range(2):
        assert onednn_is_faster(SIZES) and onednn_is_faster((60, 250, 500))
        assert not onednn_is_faster((64, 256, 256), "rows", "columns")
        in_another_process()
    assert measured == [(64, 256, 512, "rows", "rows"), (64, 256, 256, "rows", "columns")]


def test_another_number_of_threads_is_another_machine(folder, measured):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            onednn_is_faster(SIZES)
    finally:
        torch.set_num_threads(before)
    assert len(measured) == 2


def test_what_was_measured_on_a_busy_machine_says_nothing(folder, measured, monkeypatch):
    seconds = iter([(0.016, 0.032), (1e-5, 1e-5), (0.5e-4, 1e-4)])
    monkeypatch.setattr(libraries, "_best_seconds", lambda left, right: next(seconds))
    assert not onednn_is_faster(SIZES) and not (folder / "torch_scan_hop").exists()
    # it is asked again, and the answer is kept
    assert not onednn_is_faster(SIZES) and not onednn_is_faster(SIZES)
    assert onednn_is_faster((64, 256, 1024))


@pytest.mark.parametrize("kept", ["", "[1]", '{"64x256x512, rows by rows": null}', "{"])
def test_a_file_that_is_none_of_ours_is_written_anew(kept, folder, measured):
    onednn_is_faster(SIZES)
    (file,) = (folder / "torch_scan_hop").iterdir()
    file.write_text(kept)
    in_another_process()
    assert onednn_is_faster(SIZES)
    assert json.loads(file.read_text()) == {"64x256x512, rows by rows": 0.5}


def test_a_folder_that_cannot_be_written(tmp_path, measured, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(libraries, "compilers_folder", lambda: str(tmp_path / "file"))
    for _ in range(2):
        assert onednn_is_faster(SIZES)
    assert len(measured) == 1


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_measuring_leaves_a_program_as_it_is(left, right, folder, monkeypatch):
    """It is done while torch compiles: among fakes, and what the user has set."""
    state = torch.get_rng_state()
    monkeypatch.setattr(libraries, "LEAST_FLOPS_PER_SECOND", 0)
    with FakeTensorMode(), torch.device("meta"):
        onednn_is_faster((8, 16, 32), left, right)
    assert torch.equal(torch.get_rng_state(), state)
    (file,) = (folder / "torch_scan_hop").iterdir()
    assert json.loads(file.read_text())[f"8x16x32, {left} by {right}"] > 0
