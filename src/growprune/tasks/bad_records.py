"""What tasks do with data on a disk: say what is missing, and skip what cannot be read, up to a limit."""

from __future__ import annotations

from pathlib import Path

from growprune.errors import GrowpruneError, warn


class BadRecords:
    """Names and skips records that cannot be used, each once; raises when they are more than `limit`.

    The first ten are named one by one, after that each tenth, hundredth and so on.

    Args:
        source: where the records are, for the message.
        num_records: how many there are in all; 1 % of them may be bad.
        always: how many may be, however few there are. Of records that are measured on, one.
    """

    def __init__(self, source: Path | str, num_records: int, *, always: int = 10) -> None:
        self.source = source
        self.limit = max(always, num_records // 100)
        self._names: set[str] = set()

    @property
    def count(self) -> int:
        return len(self._names)

    def skip(self, name: str, why: object) -> None:
        """Leave a record out, with a warning that names it the first time."""
        if name in self._names:
            return
        self._names.add(name)
        if self.count > self.limit:
            raise GrowpruneError(
                f"{self.source}: {name}: {why}; that is bad record number {self.count}, and more than {self.limit} are "
                f"not skipped: repair or remove them"
            )
        if self.count % 10 ** (len(str(self.count - 1)) - 1) == 0:
            warn(f"{self.source}: skipped {name}: {why} ({self.count} so far)")


def find(root: str, relative: str, *, layout: str) -> Path:
    """The path of something that a data folder must have.

    Args:
        root: the data folder, as the user gave it with `--data`.
        relative: what must be there, inside of it.
        layout: what the folder should look like, for the message.
    """
    if not root:
        raise GrowpruneError(f"say where the data is with --data DIR; expected is {layout}")
    if not Path(root).exists():
        raise GrowpruneError(f"there is no {root}; expected is {layout}")
    path = Path(root) / relative
    if not path.exists():
        raise GrowpruneError(f"{root} has no {relative}; expected is {layout}")
    return path


def check_split(num_examples: int, source: Path | str, split: str, *, layout: str = "") -> None:
    """Refuse a split without examples."""
    if not num_examples:
        expected = f"; expected is {layout}" if layout else ""
        raise GrowpruneError(f"{source}: the {split} split has no examples{expected}")
