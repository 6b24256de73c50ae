"""A folder that appears whole: what was there stays until all of the new is, wherever a process is killed."""

from pathlib import Path

import pytest

from dspark.files import whole_folder


def write(folder: Path, content: str) -> None:
    with whole_folder(folder) as new:
        (new / "file").write_text(content)


def fail(folder: Path) -> None:
    with whole_folder(folder) as new:
        (new / "file").write_text("half")
        raise OSError("the disk is full")


def test_a_folder_takes_the_former_one_s_place_and_nothing_else_is_left(tmp_path: Path) -> None:
    for content in ("first", "second"):
        write(tmp_path / "draft", content)
        assert (tmp_path / "draft" / "file").read_text() == content
        assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "draft", "first")
    with pytest.raises(OSError, match="full"):
        fail(tmp_path / "draft")
    assert (tmp_path / "draft" / "file").read_text() == "first"


def test_a_kill_between_the_two_names_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path / "draft", "first")
    (tmp_path / "draft").rename(tmp_path / ".draft.former")
    (tmp_path / ".draft.partial").mkdir()
    with pytest.raises(OSError, match="full"):
        fail(tmp_path / "draft")
    assert (tmp_path / "draft" / "file").read_text() == "first"
