"""Files that are replaced as a whole: what may be replaced, and what killed writes leave."""

import os
from pathlib import Path

import pytest

from growprune.files import disk


def write(path: Path, content: bytes) -> None:
    with disk.replacing(path) as file:
        file.write(content)


def test_writing_to_a_link_changes_the_file_it_means_and_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link, chain = tmp_path / "elsewhere" / "real.html", tmp_path / "link.html", tmp_path / "chain.html"
    target.write_bytes(b"old")
    link.symlink_to(Path("elsewhere") / "real.html")  # as seen from the link, wherever one stands
    chain.symlink_to(link)
    write(chain, b"new")
    assert (link.is_symlink(), chain.is_symlink()) == (True, True)
    assert target.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["chain.html", "elsewhere", "link.html", "real.html"]


def test_a_link_to_what_is_not_there_yet_makes_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


@pytest.mark.parametrize("name", ["pipe", "folder", "link"])
def test_what_is_not_a_plain_file_is_refused_in_one_line_and_stays(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    before = {path.name: path.lstat() for path in tmp_path.iterdir()}
    with pytest.raises(OSError, match=rf"^\[Errno 22\] cannot write .*{name}: it is not a plain file; [^\n]*$"):
        write(tmp_path / name, b"new")
    assert {path.name: path.lstat() for path in tmp_path.iterdir()} == before


def test_links_that_mean_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match=r"cannot write .*a: Too many levels of symbolic links"):
        write(tmp_path / "a", b"new")
    assert (tmp_path / "a").is_symlink()


def test_what_killed_writes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left = [".best.safetensors.0a1b2c3d.tmp", ".recipe.json.12345678.tmp"]
    others = ["a.tmp", ".notes.tmp", ".x.12345.tmp", ".x.1234567g.tmp", "x.12345678.tmp", ".x.12345678.tmp.txt"]
    for name in [*left, *others]:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".folder.12345678.tmp").mkdir()
    disk.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*others, ".folder.12345678.tmp"}
    disk.remove_leftovers(tmp_path / "nowhere")


def test_a_new_file_has_a_name_that_is_known_as_a_leftover(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), disk.replacing(tmp_path / "best.safetensors"):
        disk.remove_leftovers(tmp_path)
        assert list(tmp_path.iterdir()) == []
