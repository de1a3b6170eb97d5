"""Detection: anchors, boxes, matching, the loss, the model, and COCO's numbers, each against what is known of it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from growprune.sparse.flops import count_flops
from growprune.tasks.detection import Detection
from growprune.tasks.detection.coco import NAMES, Scene, coco_numbers
from growprune.tasks.detection.ssd import decode, default_boxes, detect, encode, iou, match, multibox_loss, suppress

CPU = torch.device("cpu")
WITHOUT_OBJECTS = np.zeros((0, 6))


# Anchors


def test_there_are_8732_default_boxes_and_their_cells_are_in_order() -> None:
    anchors = default_boxes(CPU)
    assert anchors.shape == (8732, 4)
    assert 4 * 38**2 + 6 * 19**2 + 6 * 10**2 + 6 * 5**2 + 4 * 3**2 + 4 * 1**2 == 8732
    assert anchors.min() >= 0 and anchors.max() <= 1
    first = anchors[: 38 * 38].view(38, 38, 4)  # the first box of each cell of the first map: row, column
    assert torch.allclose(first[0, 1, :2], torch.tensor((12 / 300, 4 / 300)))
    assert torch.allclose(first[2, 0, :2], torch.tensor((4 / 300, 20 / 300)))
    assert torch.allclose(first[37, 37, :2], torch.ones(2))


def test_the_boxes_of_a_cell_have_the_sizes_of_the_paper() -> None:
    anchors = default_boxes(CPU) * 300
    middle = math.sqrt(21 * 45)
    lying, standing = [21 * math.sqrt(2), 21 / math.sqrt(2)], [21 / math.sqrt(2), 21 * math.sqrt(2)]
    expected = [[21, 21], [middle, middle], lying, standing]
    assert torch.allclose(anchors[: 4 * 1444 : 1444, 2:], torch.tensor(expected))
    second = anchors[5776 : 5776 + 6 * 361 : 361]
    assert torch.allclose(second[:, :2], torch.tensor([8.0, 8.0]))
    flat = [45 * math.sqrt(3), 45 / math.sqrt(3)]
    assert torch.allclose(second[4:, 2:], torch.tensor([flat, flat[::-1]]))
    last = anchors[-4:]
    assert torch.allclose(last[:, :2], torch.tensor([150.0, 150.0]))
    sizes = [[261, 261], [math.sqrt(261 * 315)] * 2, [300, 261 / math.sqrt(2)], [261 / math.sqrt(2), 300]]
    assert torch.allclose(last[:, 2:], torch.tensor(sizes))  # no wider than the image


# Boxes


def test_iou_by_hand() -> None:
    a = torch.tensor([[0.0, 0.0, 2.0, 2.0], [5.0, 5.0, 6.0, 6.0], [1.0, 1.0, 1.0, 1.0]])
    b = torch.tensor([[1.0, 1.0, 3.0, 3.0], [0.0, 0.0, 2.0, 1.0], [2.0, 0.0, 4.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    expected = torch.tensor([[1 / 7, 1 / 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.allclose(iou(a, b), expected)
    assert torch.equal(iou(a.expand(2, 3, 4), b.unsqueeze(0))[1], iou(a, b))


share = st.floats(0.0625, 0.9375, width=32)


@given(st.lists(st.tuples(share, share, share, share, share, share, share, share), min_size=1, max_size=5))
def test_decoding_gives_back_what_was_encoded(rows: list[tuple[float, ...]]) -> None:
    numbers = torch.tensor(rows)
    anchors, boxes = numbers[:, :4], torch.cat((numbers[:, 4:6], numbers[:, 4:6] + numbers[:, 6:]), 1)
    assert torch.allclose(decode(encode(boxes, anchors), anchors), boxes, atol=1e-4)


def test_offsets_by_hand() -> None:
    anchor = torch.tensor([[0.5, 0.5, 0.2, 0.4]])
    box = torch.tensor([[0.5, 0.3, 0.7, 0.5]])  # its centre is (0.6, 0.4), its size 0.2 x 0.2
    expected = torch.tensor([[0.1 / 0.2 / 0.1, -0.1 / 0.4 / 0.1, 0.0, math.log(0.5) / 0.2]])
    assert torch.allclose(encode(box, anchor), expected, atol=1e-5)


def greedy(boxes: np.ndarray, valid: np.ndarray) -> list[bool]:
    """The textbook loop."""
    kept: list[int] = []
    for j in range(len(boxes)):
        overlapping = [
            i
            for i in kept
            if 2 * common(boxes[i], boxes[j]) > area(boxes[i]) + area(boxes[j]) - common(boxes[i], boxes[j])
        ]
        if valid[j] and not overlapping:
            kept.append(j)
    return [j in kept for j in range(len(boxes))]


def area(box: np.ndarray) -> float:
    return float((box[2] - box[0]) * (box[3] - box[1]))


def common(a: np.ndarray, b: np.ndarray) -> float:
    wide, high = (min(a[2 + k], b[2 + k]) - max(a[k], b[k]) for k in (0, 1))
    return float(max(0, wide) * max(0, high))


corner, side = st.integers(0, 6), st.integers(1, 8)
some_boxes = st.lists(st.tuples(corner, corner, side, side, st.booleans()), min_size=12, max_size=12)


@given(st.lists(some_boxes, min_size=1, max_size=3))
def test_suppression_is_that_of_the_greedy_loop(lists: list[list[tuple[int, int, int, int, bool]]]) -> None:
    boxes = np.array([[(x, y, x + w, y + h) for x, y, w, h, _ in rows] for rows in lists], dtype=np.float32)
    valid = np.array([[row[4] for row in rows] for rows in lists])
    kept = suppress(torch.from_numpy(boxes), torch.from_numpy(valid))
    assert kept.tolist() == [greedy(*pair) for pair in zip(boxes, valid, strict=True)]


def test_detections_are_the_best_of_each_object_and_class() -> None:
    anchors = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.31, 0.3, 0.2, 0.2], [0.7, 0.7, 0.2, 0.2]]).repeat(100, 1)
    probabilities = torch.full((1, 300, 3), 0.01)
    probabilities[0, 0] = torch.tensor((0.2, 0.7, 0.1))
    probabilities[0, 1] = torch.tensor((0.1, 0.8, 0.1))  # the same object, surer
    probabilities[0, 2] = torch.tensor((0.5, 0.04, 0.46))
    probabilities[0, 3:, 0] = 0.98
    boxes, scores, labels = detect(torch.zeros(1, 300, 4), probabilities.log(), anchors)
    assert torch.allclose(scores[0, :3], torch.tensor((0.8, 0.46, 0.1)))
    assert labels[0, :3].tolist() == [1, 2, 2]
    assert torch.allclose(boxes[0, 0], torch.tensor((0.21, 0.2, 0.41, 0.4)))
    assert torch.allclose(boxes[0, 1], torch.tensor((0.6, 0.6, 0.8, 0.8)))
    assert boxes.shape == (1, 200, 4) and not scores[0, 3:].any()


# Matching and the loss


def test_an_anchor_goes_to_its_best_object_and_every_object_gets_one() -> None:
    anchors = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.25, 0.2, 0.2, 0.2], [0.7, 0.7, 0.4, 0.4], [0.9, 0.1, 0.1, 0.1]])
    boxes = torch.tensor([[[0.1, 0.1, 0.3, 0.3], [0.6, 0.6, 0.7, 0.7], [0.0, 0.0, 0.0, 0.0]]])
    targets, labels = match(boxes, torch.tensor([[2, 1, 0]]), anchors)
    # The second anchor's IoU with the first box is 0.15 / 0.25; the third's with the second only 1 / 16.
    assert labels.tolist() == [[2, 2, 1, 0]]
    assert torch.equal(targets[0, :3], boxes[0, [0, 0, 1]])


def naive_loss(
    offsets: np.ndarray, logits: np.ndarray, boxes: np.ndarray, labels: np.ndarray, anchors: np.ndarray
) -> float:
    """One image, anchor by anchor."""
    objects = [(box, label) for box, label in zip(boxes, labels, strict=True) if label]
    if not objects:
        return 0.0
    cut = [np.array((x - w / 2, y - h / 2, x + w / 2, y + h / 2)) for x, y, w, h in anchors]
    table = [[common(a, b) / (area(a) + area(b) - common(a, b)) for b, _ in objects] for a in cut]
    owner = [int(np.argmax(row)) if max(row) > 0.5 else None for row in table]
    claims: dict[int, int] = {}
    for number in sorted(range(len(objects)), key=lambda j: max(row[j] for row in table)):
        claims[int(np.argmax([row[number] for row in table]))] = number  # the closest is the last to claim
    owner = [claims.get(index, which) for index, which in enumerate(owner)]
    surprise = (
        np.log(np.exp(logits).sum(1)) - logits[range(len(anchors)), [0 if o is None else objects[o][1] for o in owner]]
    )
    others = np.sort([s for s, o in zip(surprise, owner, strict=True) if o is None])[::-1]
    found = [(index, objects[which][0]) for index, which in enumerate(owner) if which is not None]
    total = float(others[: 3 * len(found)].sum() + sum(surprise[index] for index, _ in found))
    for index, (x0, y0, x1, y1) in found:
        x, y, w, h = anchors[index]
        wanted = [
            ((x0 + x1) / 2 - x) / w / 0.1,
            ((y0 + y1) / 2 - y) / h / 0.1,
            math.log((x1 - x0) / w) / 0.2,
            math.log((y1 - y0) / h) / 0.2,
        ]
        for gap in np.abs(offsets[index] - wanted):
            total += 0.5 * gap**2 if gap < 1 else gap - 0.5
    return total / len(found)


def case(seed: int, num_anchors: int = 40) -> list[Tensor]:
    """Offsets, logits, boxes, labels and anchors at random: an image without objects, one with six, one with two."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.rand(num_anchors, 4, generator=generator) * 0.4 + 0.1
    near = anchors[torch.randint(num_anchors, (3, 6), generator=generator)]
    near = near + 0.03 * torch.randn(near.shape, generator=generator)
    boxes = torch.cat((near[..., :2] - near[..., 2:].abs() / 2, near[..., :2] + near[..., 2:].abs() / 2), 2)
    labels = torch.randint(1, 4, (3, 6), generator=generator)
    labels[0], labels[2, 2:] = 0, 0
    offsets, logits = (
        torch.randn(3, num_anchors, 4, generator=generator),
        torch.randn(3, num_anchors, 4, generator=generator),
    )
    return [offsets, 2 * logits, boxes, labels, anchors]


@given(st.integers(0, 10**6))
def test_the_loss_is_that_of_a_naive_loop(seed: int) -> None:
    tensors = case(seed)
    images = zip(*(tensor.numpy() for tensor in tensors[:4]), strict=True)
    expected = [naive_loss(*image, tensors[4].numpy()) for image in images]
    assert expected[0] == 0 and min(expected[1:]) > 0
    assert multibox_loss(*tensors).item() == pytest.approx(sum(expected) / 3, rel=1e-4)


def test_the_loss_asks_nothing_of_the_device_and_pulls_only_on_what_it_counts() -> None:
    with torch.device("meta"):
        multibox_loss(*(tensor.to("meta") for tensor in case(0)))  # reading any value would raise
    offsets, logits, *rest = case(0)
    multibox_loss(offsets.requires_grad_(), logits.requires_grad_(), *rest).backward()
    labels = match(*rest)[1]
    assert torch.equal(offsets.grad.abs().sum(2) > 0, labels > 0)
    counted = (logits.grad.abs().sum(2) > 0).sum(1)
    positive = (labels > 0).sum(1)
    assert counted.tolist() == [min(4 * int(number), 40) for number in positive]


def test_the_loss_of_bf16_outputs_is_taken_in_float32() -> None:
    offsets, logits, *rest = case(1)
    low = offsets.bfloat16(), logits.bfloat16()
    assert torch.equal(multibox_loss(*low, *rest), multibox_loss(low[0].float(), low[1].float(), *rest))


# The model


def test_the_model_has_the_parameters_of_ssd300() -> None:
    with torch.device("meta"):
        model, example = Detection().build_model(), Detection().example()
    counts = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_children()}
    backbone = 9_536 + 215_808 + 1_219_584 + 7_098_368  # stem and norm, layer1, layer2, layer3
    first_two = (1024 * 256 + 512 + 9 * 256 * 512 + 1024) + (512 * 256 + 512 + 9 * 256 * 512 + 1024)
    blocks = first_two + (512 * 128 + 256 + 9 * 128 * 256 + 512) + 2 * (256 * 128 + 256 + 9 * 128 * 256 + 512)
    inputs = 4 * 1024 + 6 * 512 + 6 * 512 + 6 * 256 + 4 * 256 + 4 * 256  # channels of a map times boxes of its cells
    heads = {"loc": 4 * (9 * inputs + 30), "conf": 81 * (9 * inputs + 30)}
    assert counts == {"backbone": backbone, "additional_blocks": blocks, **heads}
    assert sum(counts.values()) == 22_894_902
    flops = count_flops(model, example).by_weight
    assert flops["backbone.conv1.weight"] == 2 * 150 * 150 * 64 * 3 * 49
    assert flops["backbone.layer3.0.conv2.weight"] == 2 * 38 * 38 * 256 * 256 * 9
    assert flops["conf.5.weight"] == 2 * 4 * 81 * 256 * 9


@pytest.mark.parametrize("depth, channels", [("resnet18", 4 * 8), ("resnet50", 16 * 8)])
def test_feature_maps_and_outputs_have_their_shapes(depth: str, channels: int) -> None:
    task = Detection(depth=depth, width=8, num_classes=3)
    shapes = []
    with torch.device("meta"):
        model = task.build_model().eval()
        for head in model.loc:
            head.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape[1:])))
        offsets, logits = model(torch.zeros(2, 3, 300, 300))
    assert shapes == [(channels, 38, 38), (64, 19, 19), (64, 10, 10), (32, 5, 5), (32, 3, 3), (32, 1, 1)]
    assert offsets.shape == (2, 8732, 4) and logits.shape == (2, 8732, 4)


def test_outputs_are_in_the_order_of_the_anchors() -> None:
    model = Detection(depth="resnet18", width=8, num_classes=2).build_model().eval()
    with torch.no_grad():
        maps = {}
        model.conf[1].register_forward_hook(lambda _, inputs, output: maps.update(second=output[0]))
        _, logits = model(torch.rand(1, 3, 300, 300))
    box, row, column = 3, 4, 7
    index = 5776 + (box * 19 + row) * 19 + column
    assert torch.equal(logits[0, index], maps["second"].view(3, 6, 19, 19)[:, box, row, column])
    assert torch.allclose(default_boxes(CPU)[index, :2], torch.tensor((7.5 * 16 / 300, 4.5 * 16 / 300)))


# COCO's numbers


def scene(
    *boxes: tuple[float, float, float, float], labels: tuple[int, ...] = (), crowds: tuple[bool, ...] = ()
) -> Scene:
    table = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    return Scene(
        image_id=7,
        path=Path("picture"),
        width=400,
        height=300,
        boxes=table,
        labels=np.array(labels or [1] * len(table)),
        areas=table[:, 2] * table[:, 3],
        crowds=np.array(crowds or [False] * len(table)),
    )


def test_perfect_detections_have_everything() -> None:
    boxes = [(10.0, 20.0, 20.0, 20.0), (50.0, 50.0, 60.0, 60.0), (100.0, 100.0, 150.0, 150.0)]
    found = np.array([(*box, 0.9, label) for box, label in zip(boxes, (2, 1, 2), strict=True)])
    numbers = coco_numbers([scene(*boxes, labels=(2, 1, 2))], [found], num_classes=2)
    assert tuple(numbers) == NAMES
    assert numbers.pop("mar1") == pytest.approx(75.0)  # one detection an image and class: all of 1, half of 2
    assert all(value == pytest.approx(100.0) for value in numbers.values())


@pytest.mark.parametrize("is_crowd, expected", [(True, 100.0), (False, 50.4950495)])
def test_what_is_found_in_a_crowd_is_neither_right_nor_wrong(is_crowd: bool, expected: float) -> None:
    truth = scene((10.0, 10.0, 50.0, 50.0), (100.0, 100.0, 200.0, 200.0), crowds=(False, is_crowd))
    found = np.array([(150.0, 150.0, 30.0, 30.0, 0.4, 1.0), (10.0, 10.0, 50.0, 50.0, 0.9, 1.0)])
    assert coco_numbers([truth], [found], num_classes=1)["map"] == pytest.approx(expected)


def test_nothing_found_scores_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    overall = [name for name in NAMES if "_" not in name]
    found = coco_numbers([scene((1.0, 1.0, 5.0, 5.0))], [WITHOUT_OBJECTS], num_classes=3)
    assert found == dict.fromkeys([*overall, "map_small", "mar_small"], 0.0)
    assert coco_numbers([scene()], [WITHOUT_OBJECTS], num_classes=3) == dict.fromkeys(overall, 0.0)
    assert capsys.readouterr().out == ""


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_matches_suppresses_and_loses_as_a_cpu_does() -> None:
    tensors = case(3)
    there = [tensor.cuda() for tensor in tensors]
    assert torch.equal(match(*there[2:])[1].cpu(), match(*tensors[2:])[1])
    assert multibox_loss(*there).item() == pytest.approx(multibox_loss(*tensors).item(), rel=1e-5)
    anchors = default_boxes(torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)
    offsets, logits = (torch.randn(2, 8732, size, generator=generator) for size in (4, 5))
    seen = detect(offsets.cuda(), 3 * logits.cuda(), anchors), detect(offsets, 3 * logits, default_boxes(CPU))
    assert torch.allclose(seen[0][1].cpu(), seen[1][1], atol=1e-5)
