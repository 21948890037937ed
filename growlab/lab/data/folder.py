"""Images in class folders, with or without parts of their own for validation and test."""

from pathlib import Path
from typing import Any, Literal

from growlab.base.errors import UserError
from growlab.lab.data.folders import all_folders, open_folders
from growlab.lab.data.images import Images
from growlab.lab.data.module import ImageData
from growlab.lab.data.split import stratified_split


class FolderData(ImageData):
    """Images in folders `<class>/` below `train/`, `val/` and `test/`, or below `root` itself.

    What is missing is held out of the training images, of each class alike: `test_fraction` for the test, and for
    validation what `validation` and `validation_fraction` say. With `val/` alone beside `train/`, that is the test set.

    Args:
        root: the folder.
        on_error: what becomes of images that cannot be decoded, such as truncated files: "raise" ends the run and names
            the first one that is met; "skip" looks through all of them once, and leaves them out with a warning.
        test_fraction: the part of the images that the test takes, where there is no `test/` or `val/`.
        name: of the data.
        images: further arguments of `ImageData`.

    Raises:
        UserError: an argument cannot be used; from `setup()` also, the images cannot be found or read.
    """

    def __init__(
        self,
        root: str,
        on_error: Literal["raise", "skip"] = "raise",
        test_fraction: float = 0.1,
        name: str = "folder",
        **images: Any,
    ) -> None:
        super().__init__(name, root, **images)
        if on_error not in ("raise", "skip"):
            raise UserError(f"data.on_error={on_error} must be raise or skip.")
        if not 0 < test_fraction < 1:
            raise UserError(f"data.test_fraction={test_fraction} must lie between 0 and 1.")
        self.on_error, self.test_fraction = on_error, test_fraction

    def _open(self) -> dict[str, Images]:
        root = Path(self.root).expanduser()
        if not root.is_dir():
            raise UserError(
                f"data.root={root} is no folder; point it at the one that holds the class folders."
            )
        try:
            sets: dict[str, Images] = {
                **open_folders(all_folders(root), self.views.fit, self.on_error == "skip", False)
            }
        except OSError as error:
            raise UserError(f"cannot read the images in {root} ({error.strerror or error}).") from error
        if "test" not in sets:
            kept, held_out = stratified_split(sets["train"].labels, self.test_fraction, self.sets.split_seed)
            if not len(kept) or not len(held_out):
                raise UserError(
                    f"data.test_fraction={self.test_fraction} of {len(sets['train'])} images leaves nothing to train "
                    "or to test on; choose another fraction, or add a folder test/."
                )
            sets["test"], sets["train"] = sets["train"].select(held_out), sets["train"].select(kept)
        return sets
