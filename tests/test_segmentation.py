"""Part segmentation: geometry against loops, PointNet++ by hand, the benchmark's metric, its files, good and bad."""

from __future__ import annotations

import itertools
import json
import os
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from growprune import engine, methods
from growprune.engine.recipe import Recipe
from growprune.flops import count_flops
from growprune.partition import Partition
from growprune.tasks.segmentation import PartSegmentation, points, sampling, shapenet
from growprune.tasks.segmentation.categories import NUM_CATEGORIES, NUM_PARTS, SYNSETS, parts_by_category, parts_of
from growprune.tasks.segmentation.miou import mean_ious, predict, shape_ious
from growprune.tasks.segmentation.pointnet2 import PointNet2, Scale, SetAbstraction, group_rows

CPU = torch.device("cpu")
AIRPLANE, BAG, MUG = "02691156", "02773838", "03797390"
SUBSET = Path(__file__).parents[2] / "shared" / "data" / "shapenet_part_subset.zip"


def random_clouds(num_clouds: int, num_points: int, seed: int = 0, width: int = 3) -> Tensor:
    return torch.rand(num_clouds, num_points, width, generator=torch.Generator().manual_seed(seed))


# Geometry

clouds = st.builds(random_clouds, st.integers(1, 3), st.integers(8, 40), st.integers(0, 10**6))
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
    assert table.grad is not None
    assert table.grad[..., 0].tolist() == [[3, 1], [0, 4]]


def test_interpolation_weighs_the_three_nearest_by_inverse_squared_distance() -> None:
    known = torch.tensor([[[1.0, 0, 0], [0, 2, 0], [0, 0, 4], [9, 9, 9]]])
    features = torch.tensor([[[21.0], [42], [84], [1000]]])
    here = torch.zeros(1, 1, 3)
    # 1/1, 1/4, 1/16 of a total of 21/16: weights 16/21, 4/21, 1/21
    torch.testing.assert_close(points.interpolate(here, known, features), torch.tensor([[[16.0 + 8 + 4]]]))


def test_interpolation_at_a_known_point_gives_what_is_known() -> None:
    known, features = random_clouds(2, 6), random_clouds(2, 6, seed=1, width=4)
    torch.testing.assert_close(points.interpolate(known, known, features), features, atol=1e-4, rtol=0)


def test_interpolation_from_one_point_gives_its_features_everywhere() -> None:
    features = torch.tensor([[[1.0, 2]], [[3, 4]]])
    out = points.interpolate(random_clouds(2, 3), torch.zeros(2, 1, 3), features)
    assert out.tolist() == [[[1, 2]] * 3, [[3, 4]] * 3]


def test_a_group_has_the_features_of_the_neighbours_then_their_offsets() -> None:
    xyz = torch.tensor([[[0.0, 0, 0], [1, 2, 3], [4, 4, 4]]])
    features = torch.tensor([[[10.0], [20], [30]]])
    out = group_rows(xyz, features, xyz[:, 1:2], torch.tensor([[[1, 2, 0]]]))
    assert out.tolist() == [[[[20, 0, 0, 0], [30, 3, 2, 1], [10, -1, -2, -3]]]]


def test_a_set_abstraction_takes_the_largest_of_each_ball_at_each_scale() -> None:
    abstraction = SetAbstraction(1, 2, [Scale(1.0, 3, (1,)), Scale(20.0, 3, (1,))]).eval()
    for branch in abstraction.branches:
        branch[0].weight.data = torch.tensor([1.0, 0, 0, 0]).view(1, 4, 1, 1)  # the feature itself
    xyz = torch.tensor([[[0.0, 0, 0], [0.5, 0, 0], [9, 0, 0], [9.5, 0, 0]]])
    centres, out = abstraction(xyz, torch.tensor([[[1.0], [2], [8], [4]]]))
    assert centres[0, :, 0].tolist() == [0, 9.5]
    # of the large balls only the first three points are seen
    torch.testing.assert_close(out, torch.tensor([[[2.0, 8], [8, 8]]]), atol=1e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("num_points", [5, 128, 1000, 2048, 3000])
def test_the_kernel_chooses_the_farthest_points_that_the_loop_does(num_points: int) -> None:
    pytest.importorskip("triton")
    from growprune.tasks.segmentation import farthest

    for xyz in (random_clouds(4, num_points), (random_clouds(4, num_points) * 8).round()):
        num_samples = min(512, num_points)
        expected = points.farthest_points_by_loop(xyz.cuda(), num_samples)
        assert torch.equal(farthest.farthest_points(xyz.cuda(), num_samples), expected)


# The model


def small(**settings: object) -> PartSegmentation:
    tiny = PartSegmentation(num_points=32, batch_size=2, width=1 / 16, detail=1 / 16)
    return replace(tiny, **settings)  # type: ignore[arg-type]


def small_model(**settings: object) -> nn.Module:
    torch.manual_seed(0)
    return small(**settings).build_model()


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
    assert flops.by_layer["sa1.branches.2.3"] == 2 * 512 * 128 * 64 * 96
    assert flops.by_layer["sa2.branches.0.0"] == 2 * 128 * 64 * 323 * 128
    assert flops.by_layer["fp1.layers.0"] == 2 * 2048 * 153 * 128
    assert flops.dense == sum(flops.by_layer.values()) == 9_492_430_848


@pytest.mark.parametrize("use_normals", [True, False])
def test_every_point_gets_logits_of_all_parts(use_normals: bool) -> None:
    task = small(use_normals=use_normals)
    model = small_model(use_normals=use_normals).eval()
    seen, categories = task.example()
    assert seen.shape == (1, 32, 6 if use_normals else 3)
    assert model(seen, categories).shape == (1, 32, 50)


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


def test_the_order_of_points_does_not_matter_beyond_the_first_where_balls_hold_all() -> None:
    model = PointNet2(inputs=6, num_categories=16, num_parts=50, width=0.1, detail=1.0, dropout=0.5).eval()
    model.sa1.num_centres, model.sa2.num_centres = 12, 6
    seen, categories = random_clouds(2, 24, width=6), torch.tensor([0, 1])
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(23, generator=torch.manual_seed(0))])
    torch.testing.assert_close(model(seen[:, order], categories), model(seen, categories)[:, order])


def test_autocast_leaves_the_geometry_alone() -> None:
    model, seen = small_model(width=0.25).eval(), random_clouds(2, 32, width=6)
    categories = torch.tensor([0, 1])
    with torch.autocast("cpu", torch.bfloat16):
        low = model(seen, categories)
        centres, features = model.sa1(seen[..., :3].contiguous(), seen)
    assert (low.dtype, features.dtype, centres.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert torch.equal(centres, model.sa1(seen[..., :3].contiguous(), seen)[0])
    torch.testing.assert_close(low.float(), model(seen, categories), atol=0.05, rtol=0.05)


def test_it_can_be_cut_into_the_parts_of_the_paper() -> None:
    model = small_model()
    head = ("fp3", "fp2", "fp1", "conv1", "bn1", "conv2")
    assert len(Partition.of(model, (("sa1",), ("sa2",), ("sa3",), head))) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"batch_size": 0}, "batch_size is 0, but must be above 0"), ({"num_points": 31}, "the model picks 32 of them")],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**settings)


# The metric


def test_parts_are_numbered_through_the_categories() -> None:
    parts = dict(zip((name for name, _ in SYNSETS.values()), parts_by_category(), strict=True))
    assert (NUM_CATEGORIES, NUM_PARTS) == (16, 50)
    assert (list(parts["Motorbike"]), list(parts["Mug"])) == ([30, 31, 32, 33, 34, 35], [36, 37])
    assert (list(parts["Table"]), list(parts["Airplane"])) == ([47, 48, 49], [0, 1, 2, 3])
    assert (list(parts["Earphone"]), list(parts["Lamp"])) == ([16, 17, 18], [24, 25, 26, 27])
    assert parts_of(torch.tensor([1, 15])).nonzero().tolist() == [[0, 4], [0, 5], [1, 47], [1, 48], [1, 49]]


def test_a_prediction_is_a_part_of_the_category() -> None:
    logits = torch.zeros(1, 2, 50)
    logits[0, :, 7] = 9  # of no bag
    logits[0, 0, 5] = -1
    logits[0, 1, 4] = -1
    assert predict(logits, torch.tensor([1])).tolist() == [[4, 5]]
    logits[...] = -5
    logits[..., 5] = -4
    assert predict(logits, torch.tensor([1])).tolist() == [[5, 5]]


def test_the_iou_of_a_shape_is_the_mean_over_the_parts_of_its_category() -> None:
    # bag: part 4 has 2 of 3, part 5 has 1 of 2
    labels, predicted = torch.tensor([[4, 4, 4, 5]]), torch.tensor([[4, 4, 5, 5]])
    torch.testing.assert_close(shape_ious(predicted, labels, torch.tensor([1])), torch.tensor([(2 / 3 + 1 / 2) / 2]))


def test_a_part_that_is_neither_there_nor_predicted_counts_one_and_a_part_only_predicted_zero() -> None:
    airplane = torch.tensor([0])
    labels = torch.tensor([[0, 0, 1, 1]])
    torch.testing.assert_close(shape_ious(labels, labels, airplane), torch.ones(1))
    predicted = torch.tensor([[0, 0, 1, 3]])  # parts: 2/2, 1/2, absent, 0/1
    torch.testing.assert_close(shape_ious(predicted, labels, airplane), torch.tensor([(1 + 0.5 + 1 + 0) / 4]))


def test_instances_are_averaged_over_shapes_and_classes_over_the_categories_there_are() -> None:
    ious, categories = torch.tensor([1.0, 0.5, 0.0, 0.8]), torch.tensor([2, 2, 2, 9])
    assert mean_ious(ious, categories) == pytest.approx((2.3 / 4, (0.5 + 0.8) / 2))


# Files


def shape_text(synset: str, num_points: int, seed: int) -> str:
    """Points of a shape whose labels can be read off the first number of the normal."""
    generator = np.random.default_rng(seed)
    parts = parts_by_category()[list(SYNSETS).index(synset)]
    numbers = generator.normal(size=(num_points, 6))
    labels = generator.choice(parts, num_points)
    numbers[:, 3] = labels
    return "".join(" ".join(f"{x:.6f}" for x in (*row, n)) + "\n" for row, n in zip(numbers, labels, strict=True))


COUNTS = {"train": 5, "val": 2, "test": 3}


@pytest.fixture(autouse=True)
def fresh_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield
    forget()


def forget() -> None:
    """As if the process began anew."""
    for function in (shapenet.load, sampling.shapes_on, sampling.evaluation_set):
        function.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A benchmark of three categories with shapes of 20 to 60 points."""
    folder = tmp_path / "data" / shapenet.NAME
    (folder / "train_test_split").mkdir(parents=True)
    (folder / shapenet.INDEX).write_text(f"Airplane\t{AIRPLANE}\nBag\t{BAG}\nMug\t{MUG}\n")
    number = 0
    for split, count in COUNTS.items():
        entries = []
        for synset in (AIRPLANE, MUG, BAG)[: 3 if split != "val" else 1]:
            (folder / synset).mkdir(exist_ok=True)
            for _ in range(count):
                number += 1
                (folder / synset / f"shape{number}.txt").write_text(shape_text(synset, 20 + 3 * number % 41, number))
                entries.append(f"shape_data/{synset}/shape{number}")
        (folder / "train_test_split" / f"shuffled_{split}_file_list.json").write_text(json.dumps(entries))
    return folder


def zipped(folder: Path, path: Path, *, top: str = shapenet.NAME + "/") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*.*")):
            archive.write(file, top + str(file.relative_to(folder)))
    return path


def batches_of(task: PartSegmentation, seed: int = 1, start: int = 0) -> list[tuple[Tensor, ...]]:
    return list(task.batches(seed=seed, start=start, device=CPU))


def are_equal(one: list[tuple[Tensor, ...]], other: list[tuple[Tensor, ...]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) for batch, twin in pairs for a, b in zip(batch, twin, strict=True))


def test_a_folder_its_parent_and_zip_files_of_both_give_the_same_batches(folder: Path, tmp_path: Path) -> None:
    sources = [folder, folder.parent, zipped(folder, tmp_path / "a.zip"), zipped(folder, tmp_path / "b.zip", top="")]
    batches = [batches_of(small(data=str(source))) for source in sources]
    assert len(batches[0]) == small(data=str(folder)).num_batches() == 8
    assert all(are_equal(batches[0], others) for others in batches[1:])


def test_batches_depend_on_the_seed_alone_and_can_be_entered_anywhere(folder: Path) -> None:
    task = small(data=str(folder))
    whole = batches_of(task)
    assert are_equal(whole, batches_of(task))
    assert are_equal(whole[3:], batches_of(task, start=3))
    assert batches_of(task, start=8) == []
    assert not torch.equal(whole[0][0], batches_of(task, seed=2)[0][0])


def test_an_epoch_has_every_shape_once_with_its_category_and_labels(folder: Path) -> None:
    seen = batches_of(small(data=str(folder), scale=(1.0, 1.0), shift=0.0))
    assert [len(categories) for _, categories, _ in seen] == [2] * 7 + [1]
    assert sorted(torch.cat([c for _, c, _ in seen]).tolist()) == [0] * 5 + [1] * 5 + [11] * 5
    for shapes, categories, labels in seen:
        assert torch.equal(shapes[..., 3].long(), labels)  # as written in shape_text
        assert parts_of(categories).gather(1, labels).all()


def test_points_are_drawn_without_replacement_while_there_are_any(folder: Path) -> None:
    for shapes, _, _ in batches_of(small(data=str(folder), scale=(1.0, 1.0), shift=0.0)):
        for shape in shapes:
            there = shapenet.load(str(folder))["train"]
            clouds = np.split(there.points, there.counts.cumsum()[:-1])
            rows = {tuple(row) for row in shape.tolist()}
            (whole,) = [cloud for cloud in clouds if rows <= {tuple(row) for row in cloud.tolist()}]
            assert len(rows) == min(32, len(whole))


def test_shapes_fill_the_unit_sphere(folder: Path) -> None:
    text = (folder / MUG / "shape6.txt").read_text()
    raw = np.array([line.split() for line in text.splitlines()], np.float64)[:, :3]
    centred = raw - raw.mean(0)
    expected = centred / np.sqrt((centred**2).sum(1).max())
    train = shapenet.load(str(folder))["train"]
    np.testing.assert_allclose(np.split(train.points, train.counts.cumsum())[5][:, :3], expected, atol=1e-5)


def test_augmentation_scales_and_moves_a_shape_as_a_whole_and_leaves_normals(folder: Path) -> None:
    plain = batches_of(small(data=str(folder), scale=(1.0, 1.0), shift=0.0))
    factors, moves = [], []
    for (shapes, _, _), (changed, _, _) in zip(plain, batches_of(small(data=str(folder))), strict=True):
        assert torch.equal(shapes[..., 3:], changed[..., 3:])
        for before, after in zip(shapes[..., :3], changed[..., :3], strict=True):
            factor = (after[1] - after[0]) / (before[1] - before[0])
            torch.testing.assert_close(after, before * factor[0] + (after[0] - before[0] * factor[0]))
            factors.append(float(factor[0]))
            moves.append((after[0] - before[0] * factor[0]).tolist())
    assert 0.8 <= min(factors) < 0.95 < 1.1 < max(factors) <= 1.25
    assert len(set(factors)) == 15
    flat = np.array(moves)
    assert -0.1001 < flat.min() < -0.05 < 0.05 < flat.max() < 0.1001
    assert (np.ptp(flat, axis=1) > 0).all()


class Oracle(nn.Module):
    """Knows the labels, which the test data writes into the normals; prefers a part of no category there is."""

    def __init__(self, wrong: int | None = None) -> None:
        super().__init__()
        self.wrong = wrong
        self.num_seen = 0

    def forward(self, shapes: Tensor, categories: Tensor) -> Tensor:
        self.num_seen += len(shapes)
        logits = F.one_hot(shapes[..., 3].long(), 50).float()
        logits[..., 20] = 2
        if self.wrong is not None:
            logits[categories == self.wrong] *= -1
        return logits


@pytest.mark.parametrize("votes", [1, 3])
def test_a_model_that_knows_has_all_and_one_wrong_category_costs_its_share(folder: Path, votes: int) -> None:
    task = small(data=str(folder), votes=votes)
    model = Oracle()
    assert task.evaluate(model, "test", device=CPU) == dict.fromkeys(("instance_miou", "class_miou", "accuracy"), 100)
    assert model.num_seen == 9 * votes
    # a bag has two parts: with the other one always predicted, both have 0
    metrics = task.evaluate(Oracle(wrong=1), "test", device=CPU)
    assert metrics == pytest.approx(dict.fromkeys(metrics, 200 / 3))


def test_class_and_instance_means_differ_where_categories_do(folder: Path) -> None:
    path = folder / "train_test_split" / "shuffled_test_file_list.json"
    entries = [entry for entry in json.loads(path.read_text()) if BAG not in entry or entry.endswith("shape24")]
    path.write_text(json.dumps(entries))
    metrics = small(data=str(folder)).evaluate(Oracle(wrong=1), "test", device=CPU)
    assert len(entries) == 7
    assert metrics["instance_miou"] == pytest.approx(600 / 7)
    assert metrics["class_miou"] == pytest.approx(200 / 3)


def test_evaluation_sees_the_same_points_each_time(folder: Path) -> None:
    task, model = small(data=str(folder)), small_model().eval()
    with torch.no_grad():
        first = task.evaluate(model, "validation", device=CPU)
        forget()
        assert task.evaluate(model, "validation", device=CPU) == first


def test_the_loss_is_the_mean_cross_entropy_over_shapes(folder: Path) -> None:
    task, model = small(data=str(folder)), small_model().eval()
    batch = batches_of(task)[0]
    losses = [task.loss(model, tuple(t[i : i + 1] for t in batch)) for i in range(2)]
    torch.testing.assert_close(task.loss(model, batch), torch.stack(losses).mean())
    probabilities = model(*batch[:2]).softmax(2).gather(2, batch[2].unsqueeze(2))
    torch.testing.assert_close(task.loss(model, batch), -probabilities.log().mean())


def test_without_normals_the_same_points_have_three_numbers(folder: Path) -> None:
    with_normals, without = (batches_of(small(data=str(folder), use_normals=use)) for use in (True, False))
    assert without[0][0].shape == (2, 32, 3)
    assert torch.equal(with_normals[0][0][..., :3], without[0][0])


def test_a_sparse_run_lowers_the_loss(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        task=small(data=str(folder), batch_size=8),
        method=methods.cyclic_gap,
        options={"steps": 2, "epochs": 2, "finetune": 2},
        sparsity=0.5,
        kappa=2,
        device="cpu",
    )
    engine.train(recipe, tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "epoch"]
    assert losses[-1] < losses[0]


# The cache

together = shapenet._together


def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are parsed from now on."""
    texts: list[str] = []
    parse = shapenet._parse
    monkeypatch.setattr(shapenet, "_parse", lambda text: [texts.append(text), parse(text)][1])
    return texts


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_text_is_parsed_once_and_again_when_a_file_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = folder if kind == "folder" else zipped(folder, tmp_path / "a.zip")
    texts = parsed(monkeypatch)
    first = batches_of(small(data=str(source)))
    assert len(texts) == 15 + 2 + 9
    forget()
    assert are_equal(first, batches_of(small(data=str(source))))
    assert len(texts) == 26
    shape = folder / MUG / "shape6.txt"
    before = shape.stat()
    shape.write_text(shape.read_text().replace(".", ".0", 1)[:-2] + "\n")  # other numbers, the same size
    os.utime(shape, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))
    if kind == "zip":
        zipped(folder, source)
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))
    forget()
    assert not are_equal(first, batches_of(small(data=str(source))))
    assert len(texts) == 52
    assert len(list((tmp_path / "cache" / "growprune").iterdir())) == 1


def test_a_damaged_cache_is_no_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = batches_of(small(data=str(folder)))
    (file,) = (tmp_path / "cache" / "growprune").iterdir()
    for content in (b"", file.read_bytes()[:1000], b"PK" + bytes(100)):
        file.write_bytes(content)
        forget()
        texts = parsed(monkeypatch)
        assert are_equal(first, batches_of(small(data=str(folder))))
        assert len(texts) == 26


def test_a_cache_that_cannot_be_written_is_no_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(batches_of(small(data=str(folder)))) == 8


def test_a_cache_of_another_version_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapenet.load(str(folder))
    monkeypatch.setattr(shapenet, "VERSION", shapenet.VERSION + "0")
    forget()
    texts = parsed(monkeypatch)
    shapenet.load(str(folder))
    assert len(texts) == 26


def test_files_behind_a_link_are_watched_and_the_way_to_them_does_not_matter(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / MUG).rename(tmp_path / "elsewhere")
    (folder / MUG).symlink_to(tmp_path / "elsewhere")
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder.parent)
    shapenet.load(str(folder))
    texts = parsed(monkeypatch)
    for other in (folder.parent, tmp_path / "link", shapenet.NAME):
        forget()
        shapenet.load(str(other))
    assert texts == []
    (tmp_path / "elsewhere/shape6.txt").write_text(GOOD * 9)
    forget()
    assert 9 in shapenet.load(str(folder))["train"].counts


def test_a_file_that_changes_while_it_is_read_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shapenet, "_together", lambda shapes: [(folder / MUG / "shape6.txt").write_text(GOOD * 9), together(shapes)][1]
    )
    assert 9 not in shapenet.load(str(folder))["train"].counts
    forget()
    assert 9 in shapenet.load(str(folder))["train"].counts


# Bad input


def refusal(data: Path | str) -> str:
    with pytest.raises(ValueError) as refused:
        small(data=str(data)).num_batches()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    assert "say where the data is with --data" in refusal("")
    assert f"there is no {tmp_path / 'nowhere'}; expected is the folder" in refusal(tmp_path / "nowhere")
    lists = "train_test_split/shuffled_val_file_list.json"
    (folder / lists).unlink()
    assert f"{folder} has no {lists}" in refusal(folder)
    assert f"has no {lists}" in refusal(zipped(folder, tmp_path / "a.zip"))
    (folder / shapenet.INDEX).unlink()
    assert f"{folder} has no {shapenet.INDEX}; expected is the folder" in refusal(folder)
    assert f"{folder.parent} has no {shapenet.INDEX}" in refusal(folder.parent)
    assert f"has no {shapenet.INDEX}" in refusal(zipped(folder, tmp_path / "b.zip"))


def test_a_zip_file_that_is_none_or_is_cut_off_is_refused(folder: Path, tmp_path: Path) -> None:
    path = zipped(folder, tmp_path / "a.zip")
    path.write_bytes(path.read_bytes()[:-500])
    assert "is no folder and no whole zip file" in refusal(path)
    (tmp_path / "b.zip").write_text("hello")
    assert "is no folder and no whole zip file" in refusal(tmp_path / "b.zip")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["shape_data/02691156/sha', "is no JSON (Unterminated string"),
        ('{"a": 1}', "must be a list like"),
        ("[1, 2]", "must be a list like"),
        ("[" * 100_000, "is no JSON (maximum recursion depth"),
    ],
)
def test_a_broken_list_is_refused(folder: Path, text: str, message: str) -> None:
    relative = "train_test_split/shuffled_train_file_list.json"
    (folder / relative).write_text(text)
    assert relative in refusal(folder)
    assert message in refusal(folder)


def test_a_category_that_is_not_official_is_refused(folder: Path) -> None:
    with (folder / shapenet.INDEX).open("a") as file:
        file.write("\nDragon\t01234567\n")
    assert f"{shapenet.INDEX} line 5 has 'Dragon\\t01234567', which names none of 02691156" in refusal(folder)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_split_without_shapes_is_refused(folder: Path, split: str) -> None:
    (folder / "train_test_split" / f"shuffled_{shapenet.SPLITS[split]}_file_list.json").write_text("[]")
    assert f"the {split} split has no examples" in refusal(folder)


GOOD = "0 0 0 0 0 1 36\n"

BAD_TEXTS = {
    "there is no 03797390/shape6.txt": None,
    "the shape has no points": " \n\n",
    "line 3 has 6 columns, not the 7 of x y z nx ny nz label": GOOD * 2 + "0 0 0 0 0 36\n" + GOOD,
    "line 1 has 6 columns": "0 0 0 0 0 36\n" * 3,
    "line 2 has 'O.5', which is no number": GOOD + "0 O.5 0 0 0 1 36\n",
    "line 2 has '#', which is no number": GOOD + "# 0 0 0 0 1 36\n",
    "line 2 has '1_0', which is no number": GOOD + "1_0 0 0 0 0 1 36\n",
    "point 3 has a value that is not finite": GOOD * 2 + "nan 0 0 0 0 1 36\n",
    "point 2 has label 38; a shape of category Mug has 36 to 37": GOOD + "0 0 0 0 0 1 38\n",
    "point 1 has label 36.5; ": "0 0 0 0 0 1 36.5\n",
    "line 1 has ": "\x00\x01ÿ",
}


@pytest.mark.parametrize("message", BAD_TEXTS)
def test_a_bad_shape_is_named_and_skipped(folder: Path, tmp_path: Path, message: str) -> None:
    text, path = BAD_TEXTS[message], folder / MUG / "shape6.txt"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    for _ in range(2):  # no cache hides it
        with pytest.warns(UserWarning) as caught:
            shapes = shapenet.load(str(folder))["train"]
        (warning,) = caught
        assert f"skipped shape_data/{MUG}/shape6: {message}" in str(warning.message)
        assert sorted(shapes.categories.tolist()) == [0] * 5 + [1] * 5 + [11] * 4
        forget()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("shape_data/03001627/chair", "its category '03001627' is not in synsetoffset2category.txt"),
        ("nonsense", "expected is shape_data/<synset>/<id>"),
        (f"shape_data/{MUG}/../{BAG}/shape11", "expected is shape_data/<synset>/<id>"),
    ],
)
def test_a_bad_entry_of_a_list_is_named_and_skipped(folder: Path, entry: str, message: str) -> None:
    path = folder / "train_test_split" / "shuffled_train_file_list.json"
    path.write_text(json.dumps([entry, *json.loads(path.read_text())]))
    with pytest.warns(UserWarning, match=message):
        assert len(shapenet.load(str(folder))["train"]) == 15


def test_a_shape_damaged_inside_a_zip_file_is_named_and_skipped(folder: Path, tmp_path: Path) -> None:
    path = zipped(folder, tmp_path / "a.zip")
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{shapenet.NAME}/{MUG}/shape6.txt")
    content = bytearray(path.read_bytes())
    middle = info.header_offset + 30 + len(info.filename) + info.compress_size // 2
    content[middle : middle + 8] = bytes(8)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="shape6: .* cannot be read"):
        assert len(shapenet.load(str(path))["train"]) == 14


@pytest.mark.parametrize("split", ["val", "test"])
def test_no_shape_that_is_measured_on_is_skipped(folder: Path, split: str) -> None:
    path = folder / "train_test_split" / f"shuffled_{split}_file_list.json"
    path.write_text(json.dumps([f"shape_data/{MUG}/lost", *json.loads(path.read_text())]))
    name = {"val": "validation", "test": "test"}[split]
    expected = f"shape_data/{MUG}/lost: there is no {MUG}/lost.txt; no shape of the {name} split is skipped: repair it"
    assert expected in refusal(folder)


def test_shapes_of_any_size_are_brought_into_the_unit_sphere(folder: Path) -> None:
    (folder / MUG / "shape6.txt").write_text("1e25 0 0 0 0 1 36\n3e25 0 0 0 0 1 37\n")
    shapes = shapenet.load(str(folder))["train"]
    place = shapes.counts.tolist().index(2)
    start = int(shapes.counts[:place].sum())
    assert shapes.points[start : start + 2, 0].tolist() == [-1, 1]


def test_too_many_bad_shapes_are_an_error(folder: Path) -> None:
    path = folder / "train_test_split" / "shuffled_train_file_list.json"
    path.write_text(json.dumps([f"shape_data/{MUG}/lost{n}" for n in range(11)] + json.loads(path.read_text())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "bad record number 11" in refusal(folder)


@pytest.mark.skipif(not SUBSET.exists(), reason="the real subset is not here")
def test_the_real_subset_is_read_as_its_description_says() -> None:
    shapes = shapenet.load(str(SUBSET))
    assert {split: len(s) for split, s in shapes.items()} == {"train": 384, "validation": 60, "test": 120}
    assert {int(c) for c in shapes["train"].categories} == {0, 4, 6, 10, 11, 15}
    assert (shapes["train"].counts == 2048).all()
    rare = [int((np.split(s.labels, s.counts.cumsum()[:-1]) == np.uint8(49)).any(1).sum()) for s in shapes.values()]
    assert rare == [14, 1, 8]
