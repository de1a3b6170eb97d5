"""Image classification: the networks, what is done to images, and what is read from a disk."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.flops import count_flops
from growprune.init import sparse_init
from growprune.layers import prunable_weights
from growprune.sparse import SparseModel
from growprune.tasks.classification import UNREADABLE, Classification, augment, images, score, sources
from growprune.tasks.classification.resnet import BasicBlock, Bottleneck, ResNet, initialise
from growprune.tasks.pictures import to_rgb

Image = pytest.importorskip("PIL.Image")

CPU = torch.device("cpu")
CIFAR = Path(__file__).parents[2] / "shared" / "data" / "cifar10-small.npz"
NAMES = ("ant", "bee", "cat")


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# The networks


@pytest.mark.parametrize(
    ("name", "stem", "num_classes", "expected"),
    [
        ("resnet50", "imagenet", 1000, 25_557_032),
        ("resnet18", "imagenet", 1000, 11_689_512),
        ("resnet18", "cifar", 10, 11_173_962),
        ("resnet50", "cifar", 10, 23_520_842),
    ],
)
def test_networks_have_the_published_number_of_parameters(
    name: Any, stem: Any, num_classes: int, expected: int
) -> None:
    with torch.device("meta"):
        assert num_parameters(ResNet(name, stem=stem, num_classes=num_classes)) == expected


def stage_shapes(task: Classification) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model, x = task.build_model().eval(), task.example()
    shapes = {}
    for name in ("conv1", "maxpool", "layer1", "layer2", "layer3", "layer4", "fc"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: shapes.__setitem__(name, tuple(out.shape[1:]))
        )
    model(x)
    return shapes


def test_stages_of_resnet50_halve_the_image_and_double_the_channels() -> None:
    assert stage_shapes(Classification()) == {
        "conv1": (64, 112, 112),
        "maxpool": (64, 56, 56),
        "layer1": (256, 56, 56),
        "layer2": (512, 28, 28),
        "layer3": (1024, 14, 14),
        "layer4": (2048, 7, 7),
        "fc": (1000,),
    }


def test_the_stem_for_small_images_keeps_their_size() -> None:
    shapes = stage_shapes(Classification(model="resnet18", stem="cifar", width=8, num_classes=10, image_size=32))
    assert shapes["conv1"] == shapes["maxpool"] == shapes["layer1"] == (8, 32, 32)
    assert shapes["layer4"] == (64, 4, 4)
    assert shapes["fc"] == (10,)


def test_the_stride_is_in_the_3x3_convolution() -> None:
    with torch.device("meta"):
        model = ResNet("resnet50")
    strided = {name for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)}
    stages = ("layer2", "layer3", "layer4")
    blocks = {f"{stage}.0.{part}" for stage in stages for part in ("conv2", "downsample.0")}
    assert strided == {"conv1"} | blocks


def test_resnet50_has_the_flops_of_the_paper() -> None:
    task = Classification()
    with torch.device("meta"):
        model, example = task.build_model(), task.example()
    flops = count_flops(model, example)
    assert flops.dense == 8_178_368_512
    weights = prunable_weights(model, keep_dense=["conv1.weight", "fc"])
    assert len(prunable_weights(model)) == 54
    assert len(weights) == 52
    for sparsity, gigaflops in {0.8: 1.83, 0.9: 1.03}.items():
        assert flops.at({w.name: 1 - sparsity for w in weights}) / 1e9 == pytest.approx(gigaflops, abs=0.005)


def test_prunable_weights_are_all_parameters_but_norms_and_biases() -> None:
    with torch.device("meta"):
        model = ResNet("resnet50")
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert sum(w.numel for w in prunable_weights(model)) == matrices == 25_502_912


def norm(x: Tensor, bn: nn.BatchNorm2d) -> Tensor:
    """Batch normalisation in evaluation, written out."""
    mean, var, weight, bias = (t[:, None, None] for t in (bn.running_mean, bn.running_var, bn.weight, bn.bias))  # type: ignore[index]
    return (x - mean) / (var + 1e-5).sqrt() * weight + bias


def randomised(module: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():  # of both signs, but for variances
            drawn = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(drawn.abs() + 0.1 if name.endswith("running_var") else drawn)
    return module.eval().double()


@torch.no_grad()
def test_a_bottleneck_computes_what_its_formula_says() -> None:
    block = randomised(Bottleneck(6, 4, 2))
    x = torch.randn(2, 6, 8, 8, dtype=torch.float64)
    y = norm(torch.einsum("oi,bihw->bohw", block.conv1.weight[:, :, 0, 0], x), block.bn1).clamp(min=0)
    y = norm(F.conv2d(y, block.conv2.weight, stride=2, padding=1), block.bn2).clamp(min=0)
    y = norm(torch.einsum("oi,bihw->bohw", block.conv3.weight[:, :, 0, 0], y), block.bn3)
    down, down_bn = block.downsample
    shortcut = norm(torch.einsum("oi,bihw->bohw", down.weight[:, :, 0, 0], x[:, :, ::2, ::2]), down_bn)
    torch.testing.assert_close(block(x), (y + shortcut).clamp(min=0))


@torch.no_grad()
def test_a_basic_block_computes_what_its_formula_says() -> None:
    block = randomised(BasicBlock(4, 4, 1))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    y = norm(F.conv2d(x, block.conv1.weight, padding=1), block.bn1).clamp(min=0)
    y = norm(F.conv2d(y, block.conv2.weight, padding=1), block.bn2)
    torch.testing.assert_close(block(x), (y + x).clamp(min=0))


@torch.no_grad()
def test_a_network_is_its_stages_one_after_another() -> None:
    model = randomised(ResNet("resnet18", stem="imagenet", width=2, num_classes=3))
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y = F.conv2d(x, model.conv1.weight, stride=2, padding=3)
    y = F.max_pool2d(norm(y, model.bn1).clamp(min=0), 3, 2, 1)
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            y = block(y)
    torch.testing.assert_close(model(x), y.flatten(2).mean(2) @ model.fc.weight.T + model.fc.bias)


def test_convolutions_begin_by_hes_rule_and_no_norm_with_zeros() -> None:
    torch.manual_seed(0)
    model = ResNet("resnet50", width=32, num_classes=10)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            deviation = math.sqrt(2 / (module.in_channels * math.prod(module.kernel_size)))
            assert float(module.weight.detach().std()) == pytest.approx(deviation, rel=0.1), name
        if isinstance(module, nn.BatchNorm2d):
            assert bool((module.weight == 1).all()), name


def test_a_network_can_be_built_sparse_with_its_own_initialisation() -> None:
    task = Classification(model="resnet18", stem="cifar", width=8, num_classes=10, image_size=32)
    sparse = sparse_init(task.build_model, sparsity=0.9, initialise=initialise)
    values = dict(sparse.model.named_parameters())["layer4.0.conv2.weight"].detach()
    assert values.numel() == round(0.1 * 64 * 64 * 9)
    assert float(values.std()) == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.1)


# What is done to images


def random_pixels(count: int, height: int = 6, width: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, height, width, 3), generator=generator, dtype=torch.uint8)


def test_flips_mirror_the_images_that_are_chosen() -> None:
    pixels = random_pixels(4)
    which = torch.tensor([True, False, False, True])
    for image, out, is_flipped in zip(pixels, augment.flipped(pixels, which), which, strict=True):
        expected = [[image[y, 5 - x if is_flipped else x].tolist() for x in range(6)] for y in range(6)]
        assert out.tolist() == expected


def test_shifts_cut_from_the_image_padded_with_black() -> None:
    pixels = random_pixels(6, height=5, width=7)
    offsets = torch.tensor([[0, 0], [8, 8], [4, 4], [0, 8], [3, 5], [6, 1]])
    shifted = augment.shifted(pixels, offsets)
    for image, out, (top, left) in zip(pixels.numpy(), shifted.numpy(), offsets.tolist(), strict=True):
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
        np.testing.assert_array_equal(out, padded[top : top + 5, left : left + 7])
    assert shifted.dtype == torch.uint8
    assert torch.equal(shifted[2], pixels[2])


def test_resampling_is_that_of_pillow() -> None:
    pixels = random_pixels(5, height=20, width=24)
    boxes = torch.tensor([[0, 0, 24, 20], [3.5, 2, 12.25, 9], [0, 0, 24, 20], [10, 10, 14, 14], [7, 1, 24, 18.5]])
    for size in (8, 16, 30):
        out = augment.resampled(pixels, boxes, size)
        assert out.dtype == torch.uint8
        for image, box, result in zip(pixels.numpy(), boxes.tolist(), out.numpy(), strict=True):
            expected = np.array(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR, box=tuple(box)))
            # Pillow rounds after each of its two passes.
            assert np.abs(result.astype(int) - expected.astype(int)).max() <= 1


def test_resampling_does_not_suffer_from_autocast() -> None:
    pixels, boxes = random_pixels(2, 16, 16), torch.tensor([[1.0, 2.0, 13.0, 14.0]]).expand(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        inside = augment.resampled(pixels, boxes, 8)
    assert torch.equal(inside, augment.resampled(pixels, boxes, 8))


def box_of(numbers: list[list[float]], width: int, height: int, min_scale: float) -> tuple[float, ...]:
    """A random resized crop, one image at a time."""
    x, y = numbers[-1]
    w, h = min(width, height * 4 / 3), min(height, width * 4 / 3)
    for first, second in reversed(numbers[:-1]):
        area = width * height * (min_scale + (1 - min_scale) * first)
        ratio = (3 / 4) * (16 / 9) ** second
        if math.sqrt(area * ratio) <= width and math.sqrt(area / ratio) <= height:
            w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
    left, top = (width - w) * x, (height - h) * y
    return left, top, left + w, top + h


@pytest.mark.parametrize(("width", "height"), [(32, 32), (50, 30), (20, 90), (300, 10)])
def test_boxes_are_those_drawn_one_image_at_a_time(width: int, height: int) -> None:
    numbers = torch.rand(200, augment.NUM_TRIES + 1, 2, generator=torch.Generator().manual_seed(1))
    boxes = augment.draw_boxes(numbers, width, height, 0.08)
    for found, drawn in zip(boxes.tolist(), numbers.tolist(), strict=True):
        assert found == pytest.approx(box_of(drawn, width, height, 0.08), rel=1e-4, abs=1e-3)
    sides = boxes[:, 2:] - boxes[:, :2]
    assert bool((boxes >= 0).all())
    assert bool((boxes[:, 2] <= width + 1e-3).all() and (boxes[:, 3] <= height + 1e-3).all())
    assert bool(((sides[:, 0] / sides[:, 1]) < 4 / 3 + 1e-3).all() and ((sides[:, 0] / sides[:, 1]) > 0.749).all())


def test_every_image_that_is_streamed_and_every_seed_has_its_own_box() -> None:
    boxes = {images.random_box(i, 50, 40, seed=seed, min_scale=0.08) for i in range(10) for seed in range(10)}
    assert len(boxes) == 100


def test_every_batch_in_memory_and_every_seed_has_its_own_boxes(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    draw_boxes = augment.draw_boxes
    monkeypatch.setattr(augment, "draw_boxes", lambda *args: drawn.append(draw_boxes(*args)) or drawn[-1])
    for seed in (0, 1):
        list(small(data, crop="resized").batches(seed=seed, start=0, device=CPU))
    assert len({tuple(box) for boxes in drawn for box in boxes.tolist()}) == 2 * 4 * 8


def test_normalising_takes_the_mean_and_divides_by_the_deviation() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    out = augment.normalised(pixels, (0.5, 0.2, 0.6), (0.25, 0.1, 0.2))
    torch.testing.assert_close(out.flatten(), torch.tensor([-2.0, 0.0, 2.0]))


def test_mixing_takes_the_rest_from_the_image_before() -> None:
    values = torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1, 1)
    assert augment.mixed(values, 0.75).flatten().tolist() == [0.75 + 25.0, 7.5 + 0.25, 75.0 + 2.5]


class Fixed(nn.Module):
    """Answers with logits given beforehand."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.logits = torch.as_tensor(logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[: len(x)]


def test_the_loss_of_a_mixture_is_that_of_its_soft_targets() -> None:
    task = Classification(num_classes=4, label_smoothing=0.2)
    logits = [[1.0, 2.0, -1.0, 0.5], [0.0, -3.0, 2.0, 1.0], [4.0, 0.0, 0.0, 1.0]]
    labels, others, share = torch.tensor([1, 2, 0]), torch.tensor([3, 2, 1]), torch.tensor([0.7, 0.7, 0.4])
    batch = torch.zeros(3, 3, 2, 2), labels, others, share
    targets = torch.full((3, 4), 0.2 / 4)
    for i in range(3):
        targets[i, labels[i]] += 0.8 * share[i]
        targets[i, others[i]] += 0.8 * (1 - share[i])
    expected = -(targets * torch.tensor(logits).log_softmax(1)).sum(1)
    torch.testing.assert_close(task.loss(Fixed(logits), batch), expected.mean())
    plain = -(torch.tensor(logits).log_softmax(1)[[0, 1, 2], labels]).mean()
    torch.testing.assert_close(replace(task, label_smoothing=0.0).loss(Fixed(logits), batch[:2]), plain)


def test_scores_count_first_guesses_and_first_five() -> None:
    ranked = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3]]).expand(5, 7)
    labels = torch.tensor([0, 4, 5, 1, 6])
    first, five, loss = score(ranked, labels).tolist()
    assert (first, five) == (1, 3)
    total = math.log(sum(math.exp(v) for v in range(3, 10)))
    assert loss == pytest.approx(5 * total - (9 + 5 + 4 + 8 + 3), rel=1e-5)


def test_with_fewer_than_five_classes_all_are_among_the_first_five() -> None:
    assert score(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([0])).tolist()[:2] == [0, 1]


# What is read from a disk


def jpeg(pixels: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def picture(label: int, number: int, height: int = 12, width: int = 12) -> np.ndarray[Any, Any]:
    """A smooth image that no other equals."""
    y, x = np.mgrid[:height, :width] / max(height, width)
    channels = [80 * label + 40 * x, 60 + 5 * number + 60 * y, 128 + 100 * np.sin(number + 3 * x * y)]
    return np.stack(channels, -1).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def files() -> list[tuple[bytes, int, bool]]:
    """39 images to train on and 9 to test, with their labels, in the order of a folder."""
    counts = [(False, 13), (True, 3)]
    return [(jpeg(picture(c, 20 * t + i)), c, t) for t, n in counts for c in range(3) for i in range(n)]


def write_folder(root: Path, files: list[tuple[bytes, int, bool]]) -> str:
    for number, (content, label, is_test) in enumerate(files):
        folder = root / ("val" if is_test else "train") / NAMES[label]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:03}.{('jpg', 'JPEG', 'jpeg')[number % 3]}").write_bytes(content)
    return str(root)


def packed(files: list[tuple[bytes, int, bool]]) -> dict[str, Any]:
    return {
        "data": np.frombuffer(b"".join(content for content, _, _ in files), dtype=np.uint8),
        "offsets": np.cumsum([0] + [len(content) for content, _, _ in files]),
        "labels": np.array([label for _, label, _ in files], dtype=np.uint8),
        "split": np.array([is_test for _, _, is_test in files], dtype=np.uint8),
        "classes": np.array(NAMES),
    }


def write_packed(path: Path, arrays: dict[str, Any]) -> str:
    np.savez(path, **arrays)
    return str(path)


@pytest.fixture(params=["folder", "packed"])
def data(request: pytest.FixtureRequest, tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> str:
    if request.param == "folder":
        return write_folder(tmp_path, files)
    return write_packed(tmp_path / "images.npz", packed(files))


def small(data: str, **settings: Any) -> Classification:
    common = dict(model="resnet18", stem="cifar", width=4, num_classes=3, image_size=12, batch_size=8, workers=0)
    return Classification(data=data, **{**common, "num_validation": 6, "crop": "padded", "in_memory": True, **settings})  # type: ignore[arg-type]


VARIANTS = [
    {"in_memory": in_memory, "crop": crop, "mixup": mixup}
    for in_memory, (crop, mixup) in itertools.product((True, False), (("padded", 0.0), ("resized", 0.3)))
]


def assert_same(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert len(a) == len(b)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_an_epoch_is_the_same_each_time_and_can_be_entered_anywhere(data: str, settings: dict[str, Any]) -> None:
    task = small(data, **settings)
    epoch = list(task.batches(seed=2**62 + 1, start=0, device=CPU))
    assert [len(batch[1]) for batch in epoch] == [8, 8, 8, 8]  # 33 = 4 * 8 + 1, and the one is left out
    assert len(epoch) == task.num_batches()
    for start in range(5):
        assert_same(list(task.batches(seed=2**62 + 1, start=start, device=CPU)), epoch[start:])
    other = next(iter(task.batches(seed=5, start=0, device=CPU)))
    assert not torch.equal(other[0], epoch[0][0])


def test_batches_do_not_touch_the_global_generators(data: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for settings in VARIANTS:
        list(small(data, **settings).batches(seed=0, start=0, device=CPU))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of fork, from Python 3.12 on
@pytest.mark.parametrize("crop", ["padded", "resized"])
def test_workers_change_nothing(data: str, crop: str) -> None:
    alone, helped = (small(data, crop=crop, in_memory=False, workers=workers) for workers in (0, 2))
    for start in (0, 2):
        batches = [list(task.batches(seed=3, start=start, device=CPU)) for task in (alone, helped)]
        assert_same(*batches)


@pytest.mark.parametrize("crop", ["padded", "resized"])
def test_a_folder_and_a_packed_file_of_the_same_images_are_the_same(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], crop: str
) -> None:
    where = [write_folder(tmp_path / "folder", files), write_packed(tmp_path / "images.npz", packed(files))]
    for in_memory in (True, False):
        epochs = [list(small(d, crop=crop, in_memory=in_memory).batches(seed=0, start=0, device=CPU)) for d in where]
        assert_same(*epochs)


def test_without_crops_images_in_memory_are_those_that_are_streamed(data: str) -> None:
    epochs = [list(small(data, in_memory=held).batches(seed=0, start=0, device=CPU)) for held in (True, False)]
    assert_same(*epochs)


def test_pixels_are_those_of_the_files(data: str, files: list[tuple[bytes, int, bool]]) -> None:
    decoded = images.decode_all(data, 3, 0)
    assert decoded.labels.tolist() == [label for _, label, _ in files]
    for pixels, (content, _, _) in zip(decoded.pixels, files, strict=True):
        np.testing.assert_array_equal(pixels.numpy(), np.array(Image.open(io.BytesIO(content))))


class Recorder(nn.Module):
    """Keeps the images it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += list(x)
        return torch.zeros(len(x), 3)


def shown(task: Classification, split: Any) -> set[bytes]:
    recorder = Recorder()
    task.evaluate(recorder, split, device=CPU)
    return {image.contiguous().numpy().tobytes() for image in recorder.seen}


def trained(task: Classification, monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """The images of several epochs, without what is done to them."""
    monkeypatch.setattr(augment, "flipped", lambda pixels, which: pixels)
    monkeypatch.setattr(augment, "shifted", lambda pixels, offsets: pixels)
    epochs = (task.batches(seed=seed, start=0, device=CPU) for seed in range(6))
    return {image.contiguous().numpy().tobytes() for epoch in epochs for batch in epoch for image in batch[0]}


@pytest.mark.parametrize("in_memory", [True, False])
def test_no_image_is_in_two_splits(data: str, in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    task = small(data, in_memory=in_memory)
    train, validation, test = trained(task, monkeypatch), shown(task, "validation"), shown(task, "test")
    assert (len(train), len(validation), len(test)) == (33, 6, 9)
    assert not train & validation
    assert not train & test
    assert not validation & test


def test_validation_images_are_the_same_whatever_the_batches(data: str) -> None:
    assert shown(small(data), "validation") == shown(small(data, batch_size=4, in_memory=False), "validation")


def test_the_test_split_is_the_val_folder(data: str, files: list[tuple[bytes, int, bool]]) -> None:
    task = small(data, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255), channels_last=False)
    expected = [np.array(Image.open(io.BytesIO(content))) for content, _, is_test in files if is_test]
    recorder = Recorder()
    task.evaluate(recorder, "test", device=CPU)
    for found, pixels in zip(recorder.seen, expected, strict=True):
        np.testing.assert_allclose(found.permute(1, 2, 0).numpy(), pixels, atol=1e-3)


def test_metrics_are_in_percent_and_over_the_whole_split(data: str) -> None:
    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor([0.0, 2.0, 1.0]).expand(len(x), 3)

    metrics = small(data).evaluate(Always(), "test", device=CPU)  # three of each class
    total = math.log(1 + math.e + math.e**2)
    assert metrics == {"top1": pytest.approx(100 / 3), "top5": 100.0, "loss": pytest.approx(total - 1)}


def test_images_have_the_layout_that_is_asked_for(data: str) -> None:
    for mixup in (0.0, 0.5):
        batch = next(iter(small(data, mixup=mixup).batches(seed=0, start=0, device=CPU)))
        assert batch[0].shape == (8, 3, 12, 12)
        assert batch[0].dtype == torch.float32
        assert batch[0].is_contiguous()  # on a CPU always, where torch may crash otherwise


def test_a_mixed_batch_is_the_mixture_of_the_plain_one(data: str) -> None:
    plain = next(iter(small(data).batches(seed=4, start=0, device=CPU)))
    inputs, labels, others, share = next(iter(small(data, mixup=0.4).batches(seed=4, start=0, device=CPU)))
    assert torch.equal(labels, plain[1])
    assert others.tolist() == [labels.tolist()[i - 1] for i in range(8)]
    assert len(set(share.tolist())) == 1
    assert 0 < float(share[0]) < 1
    for i in range(8):
        expected = float(share[0]) * plain[0][i] + (1 - float(share[0])) * plain[0][i - 1]
        torch.testing.assert_close(inputs[i], expected)


def test_about_half_of_the_images_are_flipped_and_all_shifts_occur(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flips: list[bool] = []
    shifts: set[tuple[int, int]] = set()
    flipped, shifted = augment.flipped, augment.shifted
    monkeypatch.setattr(augment, "flipped", lambda p, which: (flips.extend(which.tolist()), flipped(p, which))[1])
    monkeypatch.setattr(augment, "shifted", lambda p, by: (shifts.update(map(tuple, by.tolist())), shifted(p, by))[1])
    for seed in range(30):
        list(small(data).batches(seed=seed, start=0, device=CPU))
    assert 0.45 < sum(flips) / len(flips) < 0.55
    assert shifts == set(itertools.product(range(9), range(9)))


def test_evaluation_looks_at_the_centre(tmp_path: Path) -> None:
    files = [(jpeg(picture(i % 3, i, height=64, width=96)), i % 3, i >= 9) for i in range(12)]
    data = write_packed(tmp_path / "images.npz", packed(files))
    scale = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}
    for in_memory in (True, False):
        task = small(data, crop="resized", image_size=28, num_validation=2, in_memory=in_memory, **scale)
        recorder = Recorder()
        task.evaluate(recorder, "test", device=CPU)
        for found, (content, _, _) in zip(recorder.seen, files[9:], strict=True):
            resized = Image.open(io.BytesIO(content)).resize((48, 32), Image.Resampling.BILINEAR)
            expected = np.array(resized.crop((10, 2, 38, 30)))
            # Streamed images are decoded at half their size already, which rounds otherwise.
            assert np.abs(found.permute(1, 2, 0).numpy() - expected).max() <= (1.01 if in_memory else 6)


def test_streamed_crops_are_parts_of_their_images(tmp_path: Path) -> None:
    """Images whose colours tell the place: red from left to right, green from top to bottom."""
    y, x = np.mgrid[:100, :200]
    image = np.stack([x, 2 * y, 0 * x], -1).astype(np.uint8)
    data = write_packed(tmp_path / "images.npz", packed([(jpeg(image), i % 3, i >= 9) for i in range(12)]))
    scale = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}
    task = small(data, crop="resized", image_size=16, num_validation=1, batch_size=8, in_memory=False, **scale)
    (pixels, _), *_ = task.batches(seed=7, start=0, device=CPU)
    order = sources.splits(data, 3, 1)["train"][np.random.default_rng(7).permutation(8)]
    for found, index in zip(pixels, order.tolist(), strict=True):
        left, top, right, bottom = images.random_box(index, 200, 100, seed=7, min_scale=task.min_scale)
        centres = left + (right - left) * (np.arange(16) + 0.5) / 16 - 0.5
        row = found[0].mean(0).numpy()
        row = row if row[0] < row[-1] else row[::-1]  # it may be flipped
        assert np.abs(row - centres).max() < 4
        assert (
            np.abs(found[1].mean(1).numpy() - 2 * (top + (bottom - top) * (np.arange(16) + 0.5) / 16 - 0.5)).max() < 4
        )


def test_grey_and_transparent_images_become_colour(tmp_path: Path) -> None:
    for split, mode in itertools.product(("train", "val"), ("L", "P", "RGBA", "CMYK")):
        for name in NAMES:
            (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
            kind = "jpg" if mode == "CMYK" else "png"
            Image.fromarray(picture(1, 2)).convert(mode).save(tmp_path / split / name / f"{mode}.{kind}")
    for in_memory in (True, False):
        batches = list(small(str(tmp_path), in_memory=in_memory).batches(seed=0, start=0, device=CPU))
        assert batches[0][0].shape == (6, 3, 12, 12)


def test_sixteen_bits_become_eight(tmp_path: Path) -> None:
    ramp = np.arange(144, dtype=np.uint16).reshape(12, 12)
    for split, name in itertools.product(("train", "val"), NAMES):
        (tmp_path / split / name).mkdir(parents=True)
        for number in range(3):
            Image.fromarray((256 + 1) * ramp).save(tmp_path / split / name / f"{number}.png")
    reader = images.Reader(sources.load(str(tmp_path), 3), (12, 12), None)
    _, pixels = reader[0, True]
    assert np.array_equal(pixels, np.repeat(ramp[..., None], 3, -1))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_images_without_a_known_white_are_named(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (12, 12)).save(tmp_path / "a.tiff")
    with Image.open(tmp_path / "a.tiff") as image, pytest.raises(ValueError, match=f"mode '{mode}': save it with 8"):
        to_rgb(image)


def test_a_decoder_that_breaks_names_the_image(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("Failed to decode frame 0")

    monkeypatch.setattr(images.Reader, "_decode", broken)
    reader = images.Reader(sources.load(data, 3), (12, 12), None)
    assert reader[7, True] == (7, "Failed to decode frame 0")


def test_it_can_learn_and_be_made_sparse(data: str) -> None:
    torch.manual_seed(0)
    task = small(data, label_smoothing=0.0)
    model = task.build_model()
    sparse = SparseModel(model, sparsity=0.5)
    sparse.prune()
    optimizer = sparse.attach(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    losses = []
    for batch in itertools.chain.from_iterable(task.batches(seed=s, start=0, device=CPU) for s in range(15)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    with torch.no_grad():
        assert task.evaluate(model.eval(), "test", device=CPU)["top1"] > 60


# Bad input


def spoiled(files: list[tuple[bytes, int, bool]], *which: int) -> list[tuple[bytes, int, bool]]:
    return [(c[: len(c) // 2] if i in which else c, label, test) for i, (c, label, test) in enumerate(files)]


def bad_images(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], kind: str, *which: int
) -> tuple[str, dict[int, str]]:
    files = spoiled(files, *which)
    if kind == "folder":
        data = write_folder(tmp_path, files)
        names = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*"))
        return data, dict(enumerate(sorted(names, key=lambda name: name.split("/")[2])))
    return write_packed(tmp_path / "images.npz", packed(files)), {i: f"image {i}:" for i in range(len(files))}


@pytest.mark.parametrize("kind", ["folder", "packed"])
def test_a_corrupt_image_in_memory_is_named_once_and_left_out(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], kind: str
) -> None:
    data, names = bad_images(tmp_path, files, kind, 5, 40)
    with pytest.warns(UserWarning, match="skipped") as caught:
        task = small(data, num_validation=1, batch_size=64)
        assert task.num_batches() == 1
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert names[5] in messages[0] and "(1 so far)" in messages[0]
    assert names[40] in messages[1] and "(1 so far)" in messages[1]  # those to test with count apart
    ((pixels, labels),) = task.batches(seed=0, start=0, device=CPU)
    assert len(pixels) == len(labels) == 39 - 1 - 1
    assert len(shown(task, "test")) == 8


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
@pytest.mark.parametrize("in_memory", [True, False])
def test_results_say_how_many_images_they_lack(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], in_memory: bool
) -> None:
    data, _ = bad_images(tmp_path, files, "folder", 40)
    task = small(data, in_memory=in_memory)
    assert task.evaluate(Recorder(), "test", device=CPU)["skipped"] == 1
    assert "skipped" not in task.evaluate(Recorder(), "validation", device=CPU)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["folder", "packed"])
def test_a_corrupt_image_that_is_streamed_has_no_label(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], kind: str, workers: int
) -> None:
    bad = next(i for i in range(39) if i not in sources_validation(files))
    data, names = bad_images(tmp_path, files, kind, bad)
    task = small(data, in_memory=False, workers=workers, batch_size=11)
    with pytest.warns(UserWarning, match="1 so far") as caught:
        batches = list(task.batches(seed=0, start=0, device=CPU))
    assert names[bad] in str(caught[0].message)
    sizes = [int((labels != UNREADABLE).sum()) for _, labels in batches]
    assert sorted(sizes) == [10, 11, 11]
    assert all(len(pixels) == 11 for pixels, _ in batches)  # it keeps its place, and counts nothing
    assert len(list(task.batches(seed=1, start=0, device=CPU))) == 3  # the next epoch neither warns nor counts again


def sources_validation(files: list[tuple[bytes, int, bool]]) -> set[int]:
    train = [i for i, (_, _, is_test) in enumerate(files) if not is_test]
    return set(np.array(train)[np.random.default_rng(0).permutation(len(train))[:6]].tolist())


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
@pytest.mark.parametrize("in_memory", [True, False])
def test_too_many_corrupt_images_are_an_error(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], in_memory: bool
) -> None:
    data, _ = bad_images(tmp_path, files, "folder", *range(0, 39, 2))
    with pytest.raises(ValueError, match=r"train/.*bad record number 11.*more than 10.*repair or remove"):
        list(small(data, in_memory=in_memory, batch_size=32).batches(seed=0, start=0, device=CPU))


@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_images_without_a_label_count_nothing(mixup: float) -> None:
    task = Classification(model="resnet18", stem="cifar", width=4, num_classes=3, mixup=mixup)
    logits = torch.randn(4, 3)
    labels = torch.tensor([0, UNREADABLE, 2, 1])
    batch = (torch.zeros(4, 3, 8, 8), labels, *((labels.roll(1), torch.full((4,), 0.3)) if mixup else ()))
    each = F.cross_entropy(logits, labels.clamp(min=0), label_smoothing=0.1, reduction="none")
    other = F.cross_entropy(logits, labels.roll(1).clamp(min=0), label_smoothing=0.1, reduction="none")
    each[1], other[2] = 0, 0
    expected = (0.3 * each + 0.7 * other).mean() if mixup else each.mean()
    torch.testing.assert_close(task.loss(Fixed(logits), batch), expected)


@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_a_replica_has_its_own_images_right_and_reads_no_more(
    data: str, mixup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = small(data, in_memory=False, mixup=mixup, batch_size=11)
    whole = list(task.batches(seed=3, start=0, device=CPU))
    decode, read = images.Reader._decode, []

    def counting(reader: images.Reader, pillow: Any, file: Any, index: int) -> Any:
        read.append(index)
        return decode(reader, pillow, file, index)

    monkeypatch.setattr(images.Reader, "_decode", counting)
    for replica in range(3):
        read.clear()
        part = list(task.for_replica(replica, 3).batches(seed=3, start=0, device=CPU))
        for ours, theirs in zip(part, whole, strict=True):
            assert_same([tuple(t[replica::3] for t in ours)], [tuple(t[replica::3] for t in theirs)])
        assert len(read) == len(set(read))
        assert len(read) <= (24 if mixup else 12)  # of 33


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
def test_a_split_that_cannot_be_read_is_an_error(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    data, _ = bad_images(tmp_path, files, "packed", *range(39, 48))
    for in_memory in (True, False):
        with pytest.raises(ValueError, match="bad record number 2, and more than 1 are not skipped"):
            shown(small(data, in_memory=in_memory), "test")
        sources.skipped.cache_clear()


def test_an_image_of_another_size_is_named(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    odd = [(jpeg(picture(0, 0, height=12, width=14)), 0, False) if i == 4 else f for i, f in enumerate(files)]
    data = write_packed(tmp_path / "images.npz", packed(odd))
    with pytest.warns(UserWarning, match=r"skipped image 4: it is 14 x 12, not 12 x 12; .* task\.in_memory=false"):
        small(data).num_batches()
    with pytest.raises(ValueError, match=r"crop is 'padded', and .* has images of 12 x 12: set task\.image_size"):
        list(small(data, image_size=16).batches(seed=0, start=0, device=CPU))


def test_images_of_any_size_can_be_streamed(tmp_path: Path) -> None:
    sizes = [(20, 30), (200, 31), (16, 16), (9, 90)] * 4
    files = [(jpeg(picture(i % 3, i, *size)), i % 3, i >= 12) for i, size in enumerate(sizes)]
    task = small(write_packed(tmp_path / "images.npz", packed(files)), crop="resized", in_memory=False)
    assert [len(labels) for _, labels in task.batches(seed=0, start=0, device=CPU)] == [6]
    assert len(shown(task, "test")) == 4


def test_data_that_is_not_there_is_an_error_that_shows_the_layout(tmp_path: Path) -> None:
    (tmp_path / "half" / "train").mkdir(parents=True)
    for given, why in {
        "": "say where the data is with --data DIR",
        str(tmp_path / "none"): "there is no .*none",
        str(tmp_path / "none.npz"): "there is no .*none.npz",
        str(tmp_path / "half"): "half has no val",
    }.items():
        with pytest.raises(ValueError, match=f"{why}; expected is DIR/train/<class>"):
            small(given).num_batches()


def test_a_wrong_number_of_classes_is_an_error(data: str) -> None:
    with pytest.raises(ValueError, match=r"has 3 classes, but num_classes is 7: set task\.num_classes=3"):
        small(data, num_classes=7).num_batches()


def test_a_class_only_val_has_is_an_error(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    data = write_folder(tmp_path, files)
    (tmp_path / "val" / "dog").mkdir()
    with pytest.raises(ValueError, match="val has the class 'dog', which train has not"):
        small(data).num_batches()


def test_a_class_only_train_has_is_none(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    data = write_folder(tmp_path, [f for f in files if not (f[2] and f[1] == 1)])
    recorder = Recorder()
    small(data).evaluate(recorder, "test", device=CPU)
    assert len(recorder.seen) == 6
    assert sources.load(data, 3).labels[-6:].tolist() == [0, 0, 0, 2, 2, 2]


def test_an_empty_split_is_an_error(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    for name, is_test in (("train", True), ("test", False)):
        data = write_folder(tmp_path / name, [f for f in files if f[2] is is_test])
        for kept in NAMES:
            (tmp_path / name / ("train" if is_test else "val") / kept).mkdir(parents=True)
        with pytest.raises(ValueError, match=f"the {name} split has no examples"):
            small(data).num_batches()


def test_layouts_of_others_are_told_what_is_expected(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    flat = Path(write_folder(tmp_path / "flat", files))
    for name in NAMES:
        for file in (flat / "val" / name).iterdir():
            file.rename(flat / "val" / file.name)
    with pytest.raises(ValueError, match="flat/val: the test split has no examples; expected is DIR/train/<class>"):
        small(str(flat)).num_batches()


def test_hidden_folders_are_no_classes_and_empty_ones_are_refused(
    tmp_path: Path, files: list[tuple[bytes, int, bool]]
) -> None:
    data = write_folder(tmp_path, files)
    (tmp_path / "train/.ipynb_checkpoints").mkdir()
    assert small(data).num_batches() > 0
    sources.load.cache_clear()
    (tmp_path / "train/zebra").mkdir()
    with pytest.raises(ValueError, match=r"train/zebra has no images.*remove the folder, or fill it"):
        small(data, num_classes=4).num_batches()


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
def test_one_image_is_too_few_to_train_on(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    few = [*spoiled(files, 0)[:1], *files[13:14], *files[26:27], *files[-3:]]
    data = write_packed(tmp_path / "images.npz", packed(few))
    with pytest.raises(ValueError, match="there is 1 image to train on"):
        small(data, num_validation=1).num_batches()


@pytest.mark.parametrize("count", [0, 38, 39, 100])
def test_validation_images_must_leave_some_to_train_on(data: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"num_validation is {count}, but .* has 39 training images"):
        small(data, num_validation=count).num_batches()


WRONG_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"labels": np.arange(48) % 5}, "has labels 3, 4, but the labels of 3 classes are 0 to 2"),
    "negative": ({"labels": -(np.arange(48) % 2)}, "has labels -1, but"),
    "short": ({"labels": np.zeros(47, dtype=np.uint8)}, "has 47 labels, 48 splits and 49 offsets"),
    "split": ({"split": np.full(48, 2)}, "split has 2, but must be 0"),
    "falling": ({"offsets": np.arange(49)[::-1]}, "offsets must rise"),
    "beyond": ({"offsets": 10**9 * np.arange(49)}, "offsets must rise, and not beyond the .* bytes"),
    "axes": ({"labels": np.zeros((48, 1), dtype=np.uint8)}, "labels has 2 axes"),
    "fractions": ({"labels": 0.9 * (np.arange(48) % 3)}, "labels is of float64, but must be whole numbers"),
    "words": ({"labels": np.array(["cat"] * 48)}, "labels is of <U3, but must be whole numbers"),
    "wide": ({"data": np.zeros(10**5, dtype=np.int64)}, "data is of int64, but must be uint8"),
    "pickle": ({"classes": np.array([print, "b", "c"], dtype=object)}, "cannot be read .*allow_pickle=False"),
    "absent": ({"offsets": None}, "has no array offsets.*; a packed file has data, offsets"),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_packed_files_with_wrong_contents_are_refused(
    tmp_path: Path, files: list[tuple[bytes, int, bool]], name: str
) -> None:
    wrong, why = WRONG_ARRAYS[name]
    arrays = {key: value for key, value in {**packed(files), **wrong}.items() if value is not None}
    with pytest.raises(ValueError, match=why):
        small(write_packed(tmp_path / "images.npz", arrays)).num_batches()


def test_a_file_that_is_no_packed_file_is_refused(tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> None:
    path = tmp_path / "images.npz"
    content = Path(write_packed(path, packed(files))).read_bytes()
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    for number, wrong in enumerate((b"", content[:10], content[: len(content) // 2], array.getvalue())):
        path = tmp_path / f"{number}.npz"
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="cannot be read"):
            small(str(path)).num_batches()


def test_a_packed_file_damaged_anywhere_is_an_error_of_one_line(
    tmp_path: Path, files: list[tuple[bytes, int, bool]]
) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, **packed(files))
    for place in range(0, len(file.getvalue()), 97):
        content = bytearray(file.getvalue())
        content[place] ^= 0xFF
        path = tmp_path / f"{place}.npz"
        path.write_bytes(content)
        try:
            sources.load(str(path), 3)
        except ValueError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model": "resnet34"}, "model is 'resnet34', but must be one of resnet18, resnet50"),
        ({"stem": "mnist"}, "stem is 'mnist'"),
        ({"crop": "none"}, "crop is 'none'"),
        ({"batch_size": 1}, "batch_size is 1, but must be at least 2"),
        ({"workers": -1}, "workers is -1"),
        ({"min_scale": 0.0}, "min_scale is 0.0"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"mixup": -0.1}, "mixup is -0.1"),
        ({"std": (1.0, 0.0, 1.0)}, "std is"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        small("", **settings)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # is a prototype feature, as torch says each time
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_on_a_gpu_an_epoch_is_the_same_each_time_and_does_not_wait(data: str, settings: dict[str, Any]) -> None:
    task, device = small(data, **settings), torch.device("cuda")
    epoch = list(task.batches(seed=1, start=0, device=device))
    assert all(tensor.is_cuda for batch in epoch for tensor in batch)
    assert_same(list(task.batches(seed=1, start=2, device=device)), epoch[2:])
    again = task.batches(seed=1, start=0, device=device)
    assert_same([next(again)], epoch[:1])  # what an epoch needs once is copied here
    if task.in_memory:
        torch.cuda.set_sync_debug_mode("error")
    try:
        rest = list(again)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(rest, epoch[1:])


@pytest.mark.skipif(not CIFAR.exists(), reason="the CIFAR-10 subset is not here")
def test_the_packed_cifar_subset_is_read() -> None:
    task = Classification(
        data=str(CIFAR), model="resnet18", stem="cifar", width=4, num_classes=10, image_size=32, batch_size=512,
        crop="padded", num_validation=500, in_memory=True, workers=0,
    )  # fmt: skip
    assert task.num_batches() == 9  # 4,500 images
    decoded = images.decode_all(str(CIFAR), 10, 0)
    assert decoded.pixels.shape == (6000, 32, 32, 3)
    assert bool(decoded.is_good.all())
    assert decoded.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    means = decoded.pixels.float().mean((0, 1, 2)) / 255
    torch.testing.assert_close(means, torch.tensor([0.4917, 0.4826, 0.4472]), atol=0.01, rtol=0)
