"""Windows and the placement of state: shapes alone, held against torch's own cut."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from halfstep_torch.distributed.shards import windows
from halfstep_torch.distributed.window import Window

PLACEMENTS = (Shard(0), Shard(1), Replicate())


@pytest.mark.parametrize("sizes", [(1,), (2,), (4,), (3,), (2, 2), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("shape", [(5, 7), (1, 3), (8, 8), (7, 1), (0, 4), (5, 3, 2)])
def test_windows_are_the_shards_that_torch_makes(sizes, shape):
    for placements in itertools.product(PLACEMENTS, repeat=len(sizes)):
        assert_as_torch(shape, sizes, placements)


@pytest.mark.parametrize("rows", range(9))
def test_fsdp_over_tensor_parallelism_cuts_an_axis_last(rows):
    assert_as_torch((rows, 3), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    assert_as_torch((rows, 3), (3, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0)))


def assert_as_torch(shape, sizes, placements):
    made = windows(shape, sizes, tuple(placements))
    for window, coordinate in zip(made, itertools.product(*map(range, sizes)), strict=True):
        local, offset = _compute_local_shape_and_global_offset(
            shape, sizes, lambda dim, at=coordinate: at[dim], placements
        )
        assert window.shape == tuple(local)
        assert window.is_empty or window.offset == tuple(offset)


@pytest.mark.parametrize(
    ("whole", "offset", "shape"),
    [
        ((4, 6), (1, 0), (2, 6)),
        ((4, 6), (1, 2), (2, 3)),
        ((3, 4, 5), (1, 2, 0), (2, 2, 5)),
        ((3, 4, 5), (0, 1, 2), (3, 2, 3)),
        ((7,), (2,), (3,)),
        ((), (), ()),
    ],
)
def test_the_elements_of_a_window_keep_their_index_in_the_array(whole, offset, shape):
    window = Window(whole, offset, shape)
    elements = torch.arange(torch.Size(whole).numel()).view(whole)[window.box]
    indices = window.indices(torch.arange(elements.numel()))
    assert torch.equal(indices, elements.reshape(-1))
    # Within a run they follow each other, and from run to run they do not, unless the window is all of it.
    assert (indices.view(-1, window.run).diff(dim=1) == 1).all()
    assert (
        window.is_full
        or (indices.view(-1, window.run)[1:, 0] - indices.view(-1, window.run)[:-1, -1] > 1).all()
    )
