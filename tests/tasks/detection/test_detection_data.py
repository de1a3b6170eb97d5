"""Detection: COCO's format, pictures and their augmentation, batches, evaluation, and data that is not right."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import SHARED
from PIL import Image
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.tasks.detection import Detection, coco, distortions
from growprune.tasks.detection.coco import NAMES, load
from growprune.tasks.detection.ssd import default_boxes, encode, match

CPU = torch.device("cpu")
WIDTH, HEIGHT = 200, 150
RED, BLUE = (255, 0, 0), (0, 0, 255)

Content = dict[str, list[dict[str, Any]]]


def content(num_images: int = 6) -> Content:
    """Each image has a box of the category 7; every other one has one of the category 3, and a crowd."""
    pictures, annotations = [], []
    for number in range(num_images):
        pictures.append({"id": 100 + number, "file_name": f"{number}.png", "width": WIDTH, "height": HEIGHT})
        annotations.append(
            {"image_id": 100 + number, "category_id": 7, "bbox": [40 + number, 30, 60, 50], "iscrowd": 0}
        )
        if number % 2:
            annotations.append({"image_id": 100 + number, "category_id": 3, "bbox": [150, 10, 20, 30]})
            annotations.append({"image_id": 100 + number, "category_id": 3, "bbox": [0, 100, 90, 50], "iscrowd": 1})
    for number, annotation in enumerate(annotations):
        annotation["id"] = number
    return {"images": pictures, "annotations": annotations, "categories": [{"id": 7}, {"id": 3}]}


def write(root: Path, names: dict[str, tuple[str, str]], change: Callable[[Content], object] = len) -> Path:
    """A data set whose files and folders have these names; in its pictures what is of category 7 is red.

    Args:
        change: what to do to the content of the training file.
    """
    (root / "annotations").mkdir(parents=True)
    for name, (file, folder) in names.items():
        (root / folder).mkdir()
        made = content()
        for number in range(6):
            picture = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8) + np.array(BLUE, dtype=np.uint8)
            picture[30:80, 40 + number : 100 + number] = RED
            Image.fromarray(picture).save(root / folder / f"{number}.png")
        if name == "train":
            change(made)
        (root / "annotations" / file).write_text(json.dumps(made))
    return root


THREE = {name: (f"{name}.json", name) for name in ("train", "val", "test")}
TWO = {name: (f"{name}.json", name) for name in ("train", "val")}
OFFICIAL = {name: (f"instances_{name}2017.json", f"{name}2017") for name in ("train", "val")}


def task_for(root: Path, **settings: Any) -> Detection:
    return Detection(
        **{"data": str(root), "num_classes": 2, "depth": "resnet18", "width": 8, "batch_size": 4} | settings
    )


def ids(root: Path, **settings: int) -> dict[str, list[int]]:
    splits = load(str(root), **{"num_classes": 2, "num_validation": 2} | settings)
    return {name: [scene.image_id for scene in scenes] for name, scenes in splits.items()}


# Reading


def test_with_a_labelled_test_split_every_split_is_its_own(tmp_path: Path) -> None:
    splits = load(str(write(tmp_path, THREE)), num_classes=2, num_validation=2)
    folders = {name: {scene.path.parent.name for scene in scenes} for name, scenes in splits.items()}
    assert folders == {"train": {"train"}, "validation": {"val"}, "test": {"test"}}
    assert [len(scenes) for scenes in splits.values()] == [6, 6, 6]


@pytest.mark.parametrize("names", [TWO, OFFICIAL])
def test_without_one_val_is_the_test_and_validation_is_drawn(names: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    splits = load(str(write(tmp_path, names)), num_classes=2, num_validation=2)
    folders = {name: {scene.path.parent.name for scene in scenes} for name, scenes in splits.items()}
    assert folders == {"train": {names["train"][1]}, "validation": {names["train"][1]}, "test": {names["val"][1]}}
    drawn = ids(tmp_path)
    assert len(drawn["validation"]) == 2 and sorted(drawn["train"] + drawn["validation"]) == list(range(100, 106))
    assert len(drawn["test"]) == 6


def test_categories_with_gaps_become_labels_without(tmp_path: Path) -> None:
    scenes = load(str(write(tmp_path, THREE)), num_classes=2, num_validation=1)["train"]
    assert [scene.labels.tolist() for scene in scenes[:2]] == [[2], [2, 1, 1]]  # 3 is the first, 7 the second
    assert scenes[1].boxes.tolist() == [[41, 30, 60, 50], [150, 10, 20, 30], [0, 100, 90, 50]]
    assert scenes[1].areas.tolist() == [3000, 600, 4500]


def test_crowds_are_not_trained_on(tmp_path: Path) -> None:
    album = task_for(write(tmp_path, THREE)).album("train")
    assert album.scenes[1].crowds.tolist() == [False, False, True]
    boxes, labels = album.targets
    assert labels[:2].tolist() == [[2, 0], [2, 1]]
    assert torch.allclose(boxes[1, 1], torch.tensor((150 / 200, 10 / 150, 170 / 200, 40 / 150)))


def test_a_box_partly_outside_is_cut(tmp_path: Path) -> None:
    write(tmp_path, THREE, lambda made: made["annotations"][0].update(bbox=[-20, 120, 60, 50]))
    boxes, _ = task_for(tmp_path).album("train").targets
    assert torch.allclose(boxes[0, 0], torch.tensor((0, 120 / 150, 40 / 200, 1)))


# Data that is not right

SKIPPED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown image": ({"image_id": 5}, "annotation number 0 .* 5"),
    "unknown category": ({"category_id": 4}, "annotation number 0 .* 4"),
    "no size": ({"bbox": [10, 10, 0, 5]}, r"annotation number 0 .*\[10, 10, 0, 5\]"),
    "outside": ({"bbox": [200, 0, 5, 5]}, "annotation number 0 .*200 x 150"),
    "not four": ({"bbox": [1, 2, 3]}, r"annotation number 0 .*\[1, 2, 3\]"),
    "not numbers": ({"bbox": [1, 2, 3, "4"]}, "'4'"),
    "no number": ({"bbox": [1, 2, 3, float("nan")]}, "nan"),
    "no crowd": ({"iscrowd": "0"}, "iscrowd .*'0'"),
}


@pytest.mark.parametrize("kind", SKIPPED)
def test_a_bad_record_is_named_and_skipped(kind: str, tmp_path: Path) -> None:
    wrong, message = SKIPPED[kind]
    write(tmp_path, THREE, lambda made: made["annotations"][0].update(wrong))
    with pytest.warns(UserWarning, match=f"train.json: skipped .*{message}"):
        scenes = load(str(tmp_path), num_classes=2, num_validation=1)["train"]
    assert sum(len(scene.boxes) for scene in scenes) == 11
    assert len(scenes) == 6


@pytest.mark.filterwarnings("ignore:.*skipped")
def test_too_many_bad_records_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, THREE, lambda made: [annotation.update(category_id=9) for annotation in made["annotations"]])
    with pytest.raises(ValueError, match="bad record number 11"):
        load(str(tmp_path), num_classes=2, num_validation=1)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b"[" * 100_000, ""),
        (b'{"images": [' + b"1" * 5000 + b"]}", ""),
        (b'{"images": [],\n "annotations": [}', "line 2 column 18"),
        (b'{"images": "\xff', "position 12"),
    ],
)
def test_broken_json_is_named_with_its_place(text: bytes, place: str, tmp_path: Path) -> None:
    write(tmp_path, THREE)
    (tmp_path / "annotations/val.json").write_bytes(text)
    with pytest.raises(GrowpruneError, match=rf"val\.json.*{place}"):
        load(str(tmp_path), num_classes=2, num_validation=1)


REFUSED: dict[str, tuple[Callable[[Content], object], str]] = {
    "no images": (lambda made: (made["images"].clear(), made["annotations"].clear()), "train split"),
    "no list": (lambda made: made.pop("annotations"), "'annotations'"),
    "other categories": (lambda made: made["categories"].append({"id": 9}), "3 categories"),
    "no boxes": (lambda made: made["annotations"].clear(), "no boxes"),
    "only crowds": (lambda made: [a.update(iscrowd=1) for a in made["annotations"]], "no boxes"),
    "twice": (lambda made: made["categories"][0].update(id=3), "two categories"),
    "no id": (lambda made: made["categories"][0].pop("id"), r"categories\[0\]: id must be an integer, got None"),
    "image without a name": (lambda made: made["images"][0].update(file_name=None), "image 100: file_name .*None"),
    "image without a size": (lambda made: made["images"][0].update(width=0), "image 100 has 0 x 150"),
    "image without a number": (lambda made: made["images"][0].update(width="9"), "image 100: width .*'9'"),
    "image twice": (lambda made: made["images"][0].update(id=101), "two images have the same id"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_cannot_be_used_is_refused(kind: str, tmp_path: Path) -> None:
    change, message = REFUSED[kind]
    with pytest.raises(ValueError, match=f"train.json.*{message}"):
        task_for(write(tmp_path, THREE, change)).num_batches()


@pytest.mark.parametrize(
    ("categories", "named"),
    [([{"id": 7}, {"id": 4}], "'' with id 3"), ([{"id": 7}, {"id": 3, "name": "cat"}], "'' with id 3|'cat'")],
)
def test_splits_must_have_the_same_categories(categories: list[dict[str, Any]], named: str, tmp_path: Path) -> None:
    write(tmp_path, THREE)
    other = content(0) | {"images": content()["images"], "categories": categories}
    (tmp_path / "annotations/test.json").write_text(json.dumps(other))
    with pytest.raises(GrowpruneError, match=rf"test\.json .*{named}"):
        task_for(tmp_path).num_batches()


def test_missing_files_are_named_with_the_layout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data DIR with DIR/annotations/\{train,val\}.json"):
        Detection().num_batches()
    with pytest.raises(ValueError, match=r"has no annotations/train.json"):
        task_for(tmp_path).num_batches()
    write(tmp_path / "data", TWO)
    (tmp_path / "data/val").rename(tmp_path / "data/vale")
    with pytest.raises(ValueError, match=r"data has no val\. Expected"):
        task_for(tmp_path / "data").num_batches()


def spoil(folder: Path) -> None:
    """One picture cut off, one gone, one of another size."""
    whole = (folder / "0.png").read_bytes()
    (folder / "0.png").write_bytes(whole[: len(whole) // 2])
    (folder / "1.png").unlink()
    Image.new("RGB", (20, 10)).save(folder / "2.png")


def test_pictures_that_cannot_be_read_are_named_and_left_out(tmp_path: Path) -> None:
    spoil(write(tmp_path, THREE) / "train")
    with pytest.warns(UserWarning) as caught:
        assert task_for(tmp_path, batch_size=2).num_batches() == 1  # 3 images: a batch of one cannot be normalised
    messages = [str(warning.message) for warning in caught]
    assert "0.png (id 100): image file is truncated" in messages[0]
    assert "1.png (id 101): there is no such file" in messages[1]
    assert "2.png (id 102): it has 20 x 10 pixels, and its annotation says 200 x 150" in messages[2]


@torch.no_grad()
@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("split", ["val", "test"])
def test_missing_pictures_to_measure_on_are_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, is_held: bool
) -> None:
    monkeypatch.setattr(coco, "MAX_HELD_BYTES", 10**9 if is_held else 0)
    write(tmp_path, THREE)
    (tmp_path / split / "3.png").unlink()
    with pytest.warns(UserWarning, match=r"3.png \(id 103\): there is no such file"):
        task = task_for(tmp_path, workers=0)
        task.num_batches()
    name: Any = {"val": "validation", "test": "test"}[split]
    assert task.evaluate(task.build_model().eval(), name, device=CPU)["skipped"] == 1
    (tmp_path / split / "4.png").unlink()
    coco.album.cache_clear()
    with pytest.raises(ValueError, match="bad record number 2"), pytest.warns(UserWarning):
        task.num_batches()


def test_pictures_of_one_name_in_several_folders_are_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coco, "MAX_HELD_BYTES", 0)
    write(tmp_path, THREE, lambda made: [image.update(file_name=f"{image['id']}/a.png") for image in made["images"]])
    with pytest.warns(UserWarning) as caught:
        list(task_for(tmp_path, workers=0).batches(seed=0, start=0, device=CPU))
    assert len(caught) == 6


@pytest.mark.filterwarnings("ignore:.*skipped")
def test_one_picture_is_too_few_to_train_on(tmp_path: Path) -> None:
    write(tmp_path, THREE)
    for number in range(5):
        (tmp_path / f"train/{number}.png").unlink()
    with pytest.raises(ValueError, match="training needs at least 2 readable images, got 1"):
        task_for(tmp_path).num_batches()


def test_streamed_pictures_that_cannot_be_read_have_no_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coco, "MAX_HELD_BYTES", 0)
    task = task_for(write(tmp_path, THREE), batch_size=6, workers=0)
    spoil(tmp_path / "train")
    with pytest.warns(UserWarning) as caught:
        pixels, _, labels = next(task.batches(seed=0, start=0, device=CPU))
        list(task.batches(seed=1, start=0, device=CPU))  # each is named once
    names = sorted(str(warning.message).split("skipped ")[1].split()[0] for warning in caught)
    assert names == ["0.png", "1.png", "2.png"]
    assert (labels > 0).any(1).sum() <= 3 and pixels.isfinite().all()
    (tmp_path / "val/1.png").unlink()
    perfect = Oracle(task)
    with pytest.warns(UserWarning):
        assert task.evaluate(perfect, "validation", device=CPU)["map"] == pytest.approx(100)


def test_a_replica_has_its_own_streamed_pictures_right_and_reads_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coco, "MAX_HELD_BYTES", 0)
    task = task_for(write(tmp_path, THREE), batch_size=6, workers=0)
    whole = list(task.batches(seed=1, start=0, device=CPU))
    decode, read = coco.Album._decode, []
    monkeypatch.setattr(coco.Album, "_decode", lambda album, index: (read.append(index), decode(album, index))[1])
    for replica in range(2):
        read.clear()
        part = list(task.for_replica(replica, 2).batches(seed=1, start=0, device=CPU))
        for ours, theirs in zip(part, whole, strict=True):
            assert all(torch.equal(a[replica::2], b[replica::2]) for a, b in zip(ours, theirs, strict=True))
        assert len(read) == 3  # of six


@pytest.mark.parametrize("module", ["pycocotools.cocoeval", "PIL.Image"])
def test_a_missing_package_says_what_to_install(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_for(write(tmp_path, THREE))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=r"\[detection\]"), torch.no_grad():
        task.evaluate(task.build_model().eval(), "test", device=CPU)


# Augmentation


def test_boxes_stay_with_their_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distortions, "colour", lambda images, colours: images)
    task = task_for(write(tmp_path, THREE), batch_size=6, zoom_out=1.5)
    num_checked = 0
    for seed in range(10):
        pictures, boxes, labels = next(task.batches(seed=seed, start=0, device=CPU))
        pictures = pictures * torch.tensor(distortions.STD).view(3, 1, 1) + torch.tensor(distortions.MEAN).view(3, 1, 1)
        for picture, some_boxes, some_labels in zip(pictures, boxes, labels, strict=True):
            for box in some_boxes[some_labels == 2]:
                is_red = (picture[0] > 0.5) & (picture[2] < 0.5) & (picture[1] < 0.2)
                rows, columns = is_red.any(1).nonzero(), is_red.any(0).nonzero()
                seen = torch.stack((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
                assert (box * 300 - seen).abs().max() <= 1.5
                num_checked += 1
    assert num_checked > 30


def test_objects_whose_centre_is_not_in_view_are_lost() -> None:
    boxes = torch.tensor([[[0.1, 0.1, 0.5, 0.5], [0.4, 0.4, 0.8, 0.8], [0.0, 0.0, 0.0, 0.0]]])
    views, labels = torch.tensor([[0.4, 0.2, 1.2, 1.0]]), torch.tensor([[1, 2, 0]])
    seen, kept = distortions.crop_boxes(boxes, labels, views, torch.tensor([False]))
    assert kept.tolist() == [[0, 2, 0]]
    assert torch.allclose(seen[0, 1], torch.tensor((0.0, 0.25, 0.5, 0.75)))
    mirrored, _ = distortions.crop_boxes(boxes, labels, views, torch.tensor([True]))
    assert torch.allclose(mirrored[0, 1], torch.tensor((0.5, 0.25, 1.0, 0.75)))
    assert not seen[0, [0, 2]].any()


def test_a_view_beyond_the_picture_shows_the_mean_colour() -> None:
    pixels = torch.full((1, 20, 40, 3), 255, dtype=torch.uint8)
    pixels[:, 10:] = 0  # what is below the picture is not of it
    shown = distortions.show(
        pixels, torch.tensor([[10, 40]]), torch.tensor([[-0.5, 0.0, 1.0, 3.0]]), torch.tensor([False])
    )
    assert torch.allclose(shown[0, :, :100, 100:], torch.ones(()))
    mean = torch.tensor(distortions.MEAN).view(3, 1, 1)
    assert torch.allclose(shown[0, :, 100:], mean) and torch.allclose(shown[0, :, :, :100], mean)


@pytest.mark.parametrize(
    "size, box", [((300, 300), (0, 0, 300, 300)), ((640, 480), (0, 0, 640, 480)), ((90, 70), (10, 5, 60, 65))]
)
def test_views_are_resampled_as_pillow_does(size: tuple[int, int], box: tuple[int, int, int, int]) -> None:
    width, height = size
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(picture).resize((300, 300), Image.Resampling.BILINEAR, box=box)) / 255
    pixels = torch.zeros(1, height + 7, width + 3, 3, dtype=torch.uint8)
    pixels[0, :height, :width] = torch.from_numpy(picture)
    view = torch.tensor([[box[0] / width, box[1] / height, box[2] / width, box[3] / height]])
    for mirrored in (False, True):
        shown = distortions.show(pixels, torch.tensor([[height, width]]), view, torch.tensor([mirrored]))[0].permute(
            1, 2, 0
        )
        assert np.abs((shown.flip(1) if mirrored else shown).numpy() - expected).max() < 1.5 / 255


def test_crops_keep_to_their_rules() -> None:
    boxes = torch.tensor([[0.3, 0.3, 0.8, 0.7], [0.0, 0.0, 0.0, 0.0]]).repeat(400, 1, 1)
    labels = torch.tensor([[1, 0]]).repeat(400, 1)
    views = distortions.draw_views(np.random.default_rng(0), boxes, labels, zoom_out=1.0)
    sides = views[:, 2:] - views[:, :2]
    is_whole = (sides > 1 - 1e-6).all(1)
    assert views.min() >= 0 and views.max() <= 1 + 1e-6 and sides.min() >= 0.3
    assert (sides[:, 0] / sides[:, 1]).log2().abs().max() <= 1 + 1e-4
    assert distortions.crop_boxes(boxes, labels, views, torch.zeros(400, dtype=torch.bool))[1][:, 0].all()
    assert 0.1 < is_whole.float().mean() < 0.7
    without = distortions.draw_views(np.random.default_rng(0), boxes, torch.zeros_like(labels), zoom_out=1.0)
    assert torch.equal(without, torch.tensor((0.0, 0.0, 1.0, 1.0)).repeat(400, 1))  # nothing to crop to


def test_zooming_out_lays_half_of_the_pictures_on_a_larger_canvas() -> None:
    boxes, labels = torch.zeros(400, 1, 4), torch.zeros(400, 1, dtype=torch.int64)
    views = distortions.draw_views(np.random.default_rng(0), boxes, labels, zoom_out=3.0)
    sides = views[:, 2:] - views[:, :2]
    assert torch.allclose(sides[:, 0], sides[:, 1])
    assert sides.min() >= 1 - 1e-6 and 2.8 < sides.max() <= 3
    assert views[:, :2].max() <= 0 and views[:, 2:].min() >= 1 - 1e-6
    assert 0.4 < (sides[:, 0] > 1).float().mean() < 0.6


def test_colours_change_as_they_are_drawn() -> None:
    pictures = torch.rand(2, 3, 8, 8) * 0.5 + 0.2
    none = torch.cat((torch.eye(3).flatten(), torch.ones(1))).repeat(2, 1)
    assert torch.allclose(distortions.colour(pictures, none), pictures, atol=1e-4)
    brighter = torch.cat((1.2 * torch.eye(3).flatten(), torch.ones(1))).repeat(2, 1)
    assert torch.allclose(distortions.colour(pictures, brighter), 1.2 * pictures)
    flat = torch.cat((torch.eye(3).flatten(), torch.zeros(1))).repeat(2, 1)
    grey = (pictures * torch.tensor((0.299, 0.587, 0.114)).view(3, 1, 1)).sum(1).mean((1, 2))
    assert torch.allclose(distortions.colour(pictures, flat), grey.view(2, 1, 1, 1).expand(2, 3, 8, 8), atol=1e-6)


def test_colours_leave_grey_grey_and_stay_in_their_limits() -> None:
    colours = distortions.draw_colours(np.random.default_rng(0), 200)
    on_grey = colours[:, :9].view(-1, 3, 3).sum(2)  # each channel of white
    assert torch.allclose(on_grey, on_grey[:, :1].expand(-1, 3), atol=1e-3)
    assert 0.875 - 1e-3 <= on_grey.min() < 0.89 and 1.11 < on_grey.max() <= 1.125 + 1e-3
    assert 0.5 <= colours[:, 9].min() < 0.53 and 1.47 < colours[:, 9].max() <= 1.5


# Batches and evaluation


def test_batches_depend_on_the_seed_alone_and_can_be_entered_anywhere(tmp_path: Path) -> None:
    task = task_for(write(tmp_path, THREE), batch_size=2, zoom_out=1.5)
    epoch = list(task.batches(seed=5, start=0, device=CPU))
    assert len(epoch) == task.num_batches() == 3
    assert same(epoch, list(task.batches(seed=5, start=0, device=CPU)))
    assert same(epoch[2:], list(task.batches(seed=5, start=2, device=CPU)))
    assert not same(epoch, list(task.batches(seed=6, start=0, device=CPU)))
    assert {tensor.shape[0] for batch in epoch for tensor in batch} == {2}


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of forking, from Python 3.12 on
@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_batches_are_the_held_ones(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_for(write(tmp_path, THREE), batch_size=2)
    held = list(task.batches(seed=5, start=1, device=CPU))
    monkeypatch.setattr(coco, "MAX_HELD_BYTES", 0)
    state = torch.get_rng_state()
    assert same(held, list(replace(task, workers=workers).batches(seed=5, start=1, device=CPU)))
    assert torch.equal(state, torch.get_rng_state())


def same(first: list[Any], second: list[Any]) -> bool:
    pairs = [pair for batches in zip(first, second, strict=True) for pair in zip(*batches, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def test_large_pictures_are_held_smaller(tmp_path: Path) -> None:
    def enlarge(made: Content) -> None:
        made["images"][0].update(width=1600, height=1200, file_name="large.jpg")

    write(tmp_path, THREE, enlarge)
    for folder in THREE:
        Image.new("RGB", (1600, 1200), BLUE).save(tmp_path / folder / "large.jpg")
    pixels, sizes, _ = next(task_for(tmp_path).album("train").pictures([np.arange(2)], CPU))
    assert sizes.tolist() == [[480, 640], [150, 200]] and pixels.shape == (2, 480, 640, 3)
    assert pixels[0, ..., 2].min() > 250


class Oracle(nn.Module):
    """Says where the objects of the validation split are, whatever it is shown."""

    def __init__(self, task: Detection) -> None:
        super().__init__()
        boxes, labels = task.album("validation").targets
        targets, classes = match(boxes, labels, default_boxes(CPU))
        self.answers = encode(targets, default_boxes(CPU)), 20 * nn.functional.one_hot(classes, 3).float()
        self.num_seen = 0

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        here = slice(self.num_seen, self.num_seen + len(pictures))
        self.num_seen += len(pictures)
        return self.answers[0][here], self.answers[1][here]


def test_a_model_that_knows_everything_scores_everything(tmp_path: Path) -> None:
    task = task_for(write(tmp_path, THREE))  # 6 images in 2 batches, wider than high, with crowds
    numbers = task.evaluate(Oracle(task), "validation", device=CPU)
    assert set(NAMES) - set(numbers) == {"map_large", "mar_large"}  # of which there are none
    assert numbers["map"] == pytest.approx(100)


@pytest.mark.skipif(not (SHARED / "bccd").exists(), reason="the blood cells are not here")
def test_the_blood_cells_are_read_without_a_complaint() -> None:
    splits = load(str(SHARED / "bccd"), num_classes=3, num_validation=1)
    counts = {name: (len(scenes), sum(len(scene.boxes) for scene in scenes)) for name, scenes in splits.items()}
    assert counts == {"train": (205, 2804), "validation": (87, 1137), "test": (72, 945)}


@pytest.mark.skipif(not (SHARED / "coco_mini").exists(), reason="the part of COCO is not here")
def test_a_part_of_coco_is_read_without_a_complaint() -> None:
    task = Detection(data=str(SHARED / "coco_mini"), num_validation=8, depth="resnet18", width=8)
    pictures, boxes, labels = next(task.batches(seed=0, start=0, device=CPU))
    assert len(task.album("train").scenes) == 80 and len(task.album("test").scenes) == 68
    assert pictures.shape[1:] == (3, 300, 300) and int(labels.max()) <= 80
    assert (boxes[labels > 0][:, 2:] > boxes[labels > 0][:, :2]).all()
