"""Geometry and PointNet++, against loops."""

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from segmentation_cases import clouds, random_clouds, small, small_model
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.sparse.flops import count_flops
from growprune.tasks.segmentation import PartSegmentation
from growprune.tasks.segmentation import pointnet2 as points
from growprune.tasks.segmentation.pointnet2 import Scale, SetAbstraction

# Geometry


grids = clouds.map(lambda cloud: (cloud * 4).round())  # many equal distances, and points in the same place


def farthest_by_definition(cloud: Tensor, num_samples: int) -> list[int]:
    chosen = [0]
    while len(chosen) < num_samples:
        gaps = [min(float((p - cloud[c]).square().sum()) for c in chosen) for p in cloud]
        chosen.append(gaps.index(max(gaps)))
    return chosen


@given(grids, st.integers(1, 8))
def test_farthest_points_are_those_of_the_definition(xyz: Tensor, num_samples: int) -> None:
    expected = [farthest_by_definition(cloud, num_samples) for cloud in xyz]
    assert points.farthest_points(xyz, num_samples).tolist() == expected


@given(clouds)
def test_squared_distances_are_those_of_the_definition(xyz: Tensor) -> None:
    others = xyz.flip(1)[:, :5]
    expected = (xyz[:, :, None] - others[:, None]).square().sum(-1)
    torch.testing.assert_close(points.squared_distances(xyz, others), expected)
    assert not points.squared_distances(xyz, xyz).diagonal(dim1=1, dim2=2).any()


@given(clouds, st.sampled_from([0.1, 0.3, 0.6, 2.0]), st.integers(1, 50))
def test_a_ball_has_the_first_points_inside_and_is_filled_up_with_the_first(xyz: Tensor, r: float, k: int) -> None:
    centres = xyz[:, :4]
    distances = points.squared_distances(centres, xyz)
    index = points.ball_query(distances, r, k)
    for cloud, centre in itertools.product(range(len(xyz)), range(4)):
        inside = [j for j, distance in enumerate(distances[cloud, centre].tolist()) if distance <= np.float32(r**2)]
        assert index[cloud, centre].tolist() == (inside + [inside[0]] * k)[:k]


def test_the_border_belongs_to_the_ball() -> None:
    assert points.ball_query(torch.tensor([[[0.0, 4.0, 4.1]]]), 2.0, 3).tolist() == [[[0, 1, 0]]]


def test_rows_come_from_their_own_cloud_and_gradients_add_up_there() -> None:
    table = torch.tensor([[[1.0, 2], [3, 4]], [[5, 6], [7, 8]]], requires_grad=True)
    index = torch.tensor([[[0, 0], [1, 0]], [[1, 1], [1, 1]]])
    out = points.rows(table, index)
    assert out[..., 0].tolist() == [[[1, 1], [3, 1]], [[7, 7], [7, 7]]]
    out.sum().backward()
    assert table.grad[..., 0].tolist() == [[3, 1], [0, 4]]


def test_interpolation_weighs_the_three_nearest_by_inverse_squared_distance() -> None:
    known = torch.tensor([[[1.0, 0, 0], [0, 2, 0], [0, 0, 4], [9, 9, 9]]])
    features = torch.tensor([[[21.0], [42], [84], [1000]]])
    here = torch.zeros(1, 1, 3)
    # 1/1, 1/4, 1/16 of a total of 21/16: weights 16/21, 4/21, 1/21
    torch.testing.assert_close(points.interpolate(here, known, features), torch.tensor([[[16.0 + 8 + 4]]]))


def test_interpolation_from_one_point_gives_its_features_everywhere() -> None:
    features = torch.tensor([[[1.0, 2]], [[3, 4]]])
    out = points.interpolate(random_clouds(2, 3), torch.zeros(2, 1, 3), features)
    assert out.tolist() == [[[1, 2]] * 3, [[3, 4]] * 3]


def test_a_group_has_the_features_of_the_neighbours_then_their_offsets() -> None:
    abstraction = SetAbstraction(1, 1, [Scale(9.0, 3, (4,))]).eval()
    seen: list[Tensor] = []
    abstraction.branches[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    abstraction(torch.tensor([[[1.0, 2, 3], [4, 4, 4], [0, 0, 0]]]), torch.tensor([[[20.0], [30], [10]]]))
    expected = [[[[20, 0, 0, 0], [30, 3, 2, 1], [10, -1, -2, -3]]]]
    assert seen[0].permute(0, 2, 3, 1).tolist() == expected


def test_a_set_abstraction_takes_the_largest_of_each_ball_at_each_scale() -> None:
    abstraction = SetAbstraction(1, 2, [Scale(1.0, 3, (1,)), Scale(20.0, 3, (1,))]).eval()
    for branch in abstraction.branches:
        branch[0].weight.data = torch.tensor([1.0, 0, 0, 0]).view(1, 4, 1, 1)  # the feature itself
    xyz = torch.tensor([[[0.0, 0, 0], [0.5, 0, 0], [9, 0, 0], [9.5, 0, 0]]])
    centres, out = abstraction(xyz, torch.tensor([[[1.0], [2], [8], [4]]]))
    assert centres[0, :, 0].tolist() == [0, 9.5]
    # of the large balls only the first three points are seen
    torch.testing.assert_close(out, torch.tensor([[[2.0, 8], [8, 8]]]), atol=1e-3, rtol=0)


# The model


def layers_of(first: int, *widths: int) -> list[int]:
    """Weights of shared layers, and two numbers for each norm."""
    return [a * b + 2 * b for a, b in itertools.pairwise((first, *widths))]


SIZES = {
    "sa1": layers_of(6 + 3, 32, 32, 64) + layers_of(9, 64, 64, 128) + layers_of(9, 64, 96, 128),
    "sa2": layers_of(320 + 3, 128, 128, 256) + layers_of(323, 128, 196, 256),
    "sa3": layers_of(512 + 3, 256, 512, 1024),
    "fp3": layers_of(512 + 1024, 256, 256),
    "fp2": layers_of(320 + 256, 256, 128),
    "fp1": layers_of(16 + 3 + 6 + 128, 128, 128),
    "conv1": [128 * 128],
    "bn1": [2 * 128],
    "conv2": [128 * 50 + 50],
}


def test_every_module_has_the_size_it_should() -> None:
    with torch.device("meta"):
        model = PartSegmentation().build_model()
    sizes = {n: sum(p.numel() for p in child.parameters()) for n, child in model.named_children() if n != "drop1"}
    assert sizes == {name: sum(numbers) for name, numbers in SIZES.items()}
    no_bias = sum(m.out_channels for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d) and m.bias is None)
    assert (sum(sizes.values()), sum(sizes.values()) + no_bias) == (1_736_986, 1_741_822)


def test_flops_are_counted_on_the_meta_device_and_are_positions_times_weights() -> None:
    task = PartSegmentation()
    with torch.device("meta"):
        flops = count_flops(task.build_model(), task.example())
    assert flops.by_weight["sa1.branches.2.3.weight"] == 2 * 512 * 128 * 64 * 96
    assert flops.by_weight["sa2.branches.0.0.weight"] == 2 * 128 * 64 * 323 * 128
    assert flops.by_weight["fp1.layers.0.weight"] == 2 * 2048 * 153 * 128
    assert flops.dense == sum(flops.by_weight.values()) == 9_492_430_848


def test_every_point_gets_logits_of_all_parts() -> None:
    assert small_model().eval()(*small().example()).shape == (1, 32, 50)


def test_gradients_reach_every_parameter() -> None:
    model = small_model(width=0.25, dropout=0.0)
    out = model(random_clouds(2, 32, width=6), torch.tensor([3, 5]))
    F.cross_entropy(out.flatten(0, 1), torch.arange(64) % 50).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_the_category_matters_and_shapes_do_not_see_each_other() -> None:
    model = small_model().eval()
    seen = random_clouds(2, 32, width=6)
    both = model(seen, torch.tensor([3, 5]))
    torch.testing.assert_close(both[1:], model(seen[1:], torch.tensor([5])))
    assert not torch.allclose(both[1:], model(seen[1:], torch.tensor([6])))


def test_autocast_leaves_the_geometry_alone() -> None:
    model, seen = small_model(width=0.25).eval(), random_clouds(2, 32, width=6)
    categories = torch.tensor([0, 1])
    with torch.autocast("cpu", torch.bfloat16):
        low = model(seen, categories)
        centres, features = model.sa1(seen[..., :3].contiguous(), seen)
    assert (low.dtype, features.dtype, centres.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert torch.equal(centres, model.sa1(seen[..., :3].contiguous(), seen)[0])
    torch.testing.assert_close(low.float(), model(seen, categories), atol=0.05, rtol=0.05)


def test_interpolation_at_a_known_point_gives_what_is_known() -> None:
    known, features = random_clouds(2, 6), random_clouds(2, 6, seed=1, width=4)
    torch.testing.assert_close(points.interpolate(known, known, features), features, atol=1e-4, rtol=0)
