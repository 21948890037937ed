"""The Lightning data module for labelled images."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from growlab.base.errors import UserError
from growlab.base.settings import sorted_into
from growlab.lab.data.arguments import check_numbers
from growlab.lab.data.arrival import Arrival
from growlab.lab.data.augment import Augmentation
from growlab.lab.data.cache import held
from growlab.lab.data.crops import Views
from growlab.lab.data.images import EncodedImages, ImageArray, Images
from growlab.lab.data.loaders import EpochPlan, MemoryLoader, StreamLoader
from growlab.lab.data.readers import ImageBatches, Readers, Reading, workers_of_rank
from growlab.lab.data.run_data import RunData
from growlab.lab.data.sources import open_images
from growlab.lab.data.split import Sets, first_balanced
from growlab.lab.data.statistics import Standardisation
from growlab.parts import Part

log = logging.getLogger(__name__)


class ImageData(RunData):
    """Labelled images, by name or from a folder, as augmented and normalised batches.

    A batch is (x float32 [B, C, H, W], y int64 [B]). Order and augmentation are functions of (seed, epoch,
    image) alone, so a resumed run and a run on another number of ranks see the same images. The attributes
    `num_classes`, `image_shape` (C, H, W), `num_train`, `num_val`, `num_test`, `mean` and `std` are known
    after `setup()`.

    Args:
        name: digits, cifar10, cifar100, mnist, fashion_mnist, or any name for data that lies in `root`.
        root: folder with torchvision's files, Hugging Face Parquet files or `train/<class>/*.png`; None =
            `$GROWLAB_DATA/<name>`, else `~/.cache/growlab/<name>`; digits then come from scikit-learn.
        download: fetch the data where nothing is there.
        batch_size: images in a training batch over all ranks; B_base of Eq. 8 of the growth schedule.
        eval_batch_size: most images in a validation or test batch over all ranks.
        seed: of order and augmentation.
        settings: fields of the classes in `SETTINGS`.

    Raises:
        UserError: an argument cannot be used; from `setup()` also, the data cannot be found or read.
        TypeError: there is no such setting.
    """

    SETTINGS = (Sets, Views, Augmentation, Standardisation, Arrival, Reading)

    goes_with = (
        "images go with objective=classification and networks that take image_shape and num_classes and return "
        "[batch, num_classes], such as model=resnet20"
    )

    def __init__(
        self,
        name: str,
        root: str | None = None,
        download: bool = True,
        batch_size: int = 128,
        eval_batch_size: int = 1000,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(batch_size, seed)
        check_numbers(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        self.name, self.root, self.download = name, root, download
        self.eval_batch_size = eval_batch_size
        kinds = sorted_into(self.SETTINGS, settings, type(self).__name__)
        self.sets, self.views, self.augmentation, self._standards, self._arrival, self._reading = kinds
        if self.views.crop is not None and self._reading.in_memory:
            raise UserError(
                "random crops (data.crop_scale) are cut from the images as they lie in their files; leave out "
                "data.in_memory=true."
            )
        self.channels_last = self._reading.channels_last
        self.mean, self.std = self._standards.mean, self._standards.std
        self.incremental, self.epoch_parts = self._arrival.incremental, self._arrival.epoch_parts
        self._images: dict[str, Images] = {}
        self._readers: dict[str, Readers] = {}
        # Part of the data, what it was chosen by, and the images themselves.
        self._of_task: dict[str, tuple[Any, Images]] = {}

    def prepare_data(self) -> None:
        """Fetch and decode what is not there yet; Lightning calls this in one process a machine."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Read the data, once, whatever the stage."""
        validation = self.sets.validation
        if validation == "none" and self.trainer is not None:
            # Else Lightning warns of an empty list, and likewise if the method were missing.
            self.trainer.limit_val_batches = 0
        if self._images:
            return
        images = self._open()
        train = images.pop("train")
        train = train.select(self.sets.first(train.labels, "train"))
        if self.views.crop is None or isinstance(train, ImageArray):
            train = self._held(train)
        if validation != "split":
            images.pop("val", None)
        for name, part in images.items():
            images[name] = self._held(part.select(self.sets.first(part.labels, "test")))
            frame = images[name].frame
            if train.frame != frame:
                raise UserError(
                    f"{name} images have the shape {astuple(frame)}, training images {astuple(train.frame)} "
                    "(height, width, channels); bring them to one size with data.image_size=N."
                )
        images["train"], test = train, images["test"]
        if validation == "split" and "val" not in images:
            kept, held_out = self.sets.split(train.labels)
            images["train"], images["val"] = train.select(kept), train.select(held_out)
        height, width, channels = astuple(train.frame)
        self.image_shape = (channels, height, width)
        self.num_classes = len(train.classes)
        if self.num_classes < 2:
            raise UserError(
                f"all training images are of one class, {train.classes[0]!r}: there is nothing to tell apart."
            )
        self.num_train, self.num_test = len(images["train"]), len(test)
        self.num_val = {"none": 0, "split": len(images.get("val", ())), "test": len(test)}[validation]
        self._arrival.check(self.num_classes)
        self.mean, self.std, self._normalisation = self._standards.of(images["train"], channels)
        self._images = images
        if self._reading.num_workers and all(self._is_held(part, name) for name, part in images.items()):
            log.warning(
                "data.num_workers=%d has no effect: the images are held in memory, where nothing is left to read",
                self._reading.num_workers,
            )

    def _is_held(self, images: Images, part: str) -> bool:
        """Whether batches are made of images in memory; random crops for training are cut as files are read."""
        cropped = part == "train" and self.views.crop is not None
        return isinstance(images, ImageArray) and self._reading.in_memory is not False and not cropped

    def _held(self, images: Images) -> Images:
        """Decoded, if they are to be held in memory, and of one size."""
        if isinstance(images, ImageArray):
            return images.fitted(self.views.fit)
        return held(images, self._reading.in_memory)

    def _open(self) -> dict[str, Images]:
        """The training and the test set, and a validation set where the data has its own."""
        return open_images(self.name, self.root, self.download, self.views.fit)

    def teardown(self, stage: str | None = None) -> None:
        """End the processes that read images."""
        for readers in self._readers.values():
            readers.close()
        self._readers.clear()

    def training_batches(
        self, count: int, epoch: int | None = None, augmented: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the first batches of an epoch, this rank's part of each.

        Like `train_dataloader` a function of seed and epoch, and it leaves the epoch's own batches alone.

        Args:
            count: number of batches; as many as there are, if there are fewer.
            epoch: None: the trainer's current one.
            augmented: shift and mirror the images as training does (random crops are left out).
        """
        epoch = self._now if epoch is None else epoch
        train = self._current("train", epoch)
        plan = self._training_plan(epoch, epoch)
        labels = torch.from_numpy(train.labels)
        batches = []
        for part in plan.batches()[:count]:
            images = train.read(part).cpu()
            if augmented:
                images = self.augmentation.apply(images, plan.draw(part))
            batches.append((self._normalisation.apply(images, self.channels_last), labels[part]))
        return batches

    def training_loader(self, epoch: int, draw: int) -> MemoryLoader | StreamLoader:
        """Return batches of the training images of an epoch, in the order and augmented as those of another.

        Args:
            epoch: decides which images there are, and the batch size.
            draw: order and augmentation are functions of this number.

        Raises:
            UserError: the number of processes does not divide the batch size.
        """
        return self._loader("train", self._training_plan(epoch, draw), epoch)

    def _training_plan(self, epoch: int, draw: int) -> EpochPlan:
        batch_size = self.global_batch_size(epoch)
        rank, world_size = self._place_for(batch_size)
        train = self._current("train", epoch)
        blocks_N = train.blocks_N if isinstance(train, EncodedImages) else None
        return EpochPlan(
            *(len(train), batch_size, self.seed, draw, self.augmentation, rank, world_size),
            *(blocks_N, self._reading.shuffle_window, self.epoch_parts),
        )

    def val_dataloader(self) -> MemoryLoader | StreamLoader | list:
        """Return the validation images in order; an empty list without validation."""
        if self.sets.validation == "none":
            return []
        return self._evaluation(self.watched)

    def test_dataloader(self) -> MemoryLoader | StreamLoader:
        """Return the test images in order."""
        return self._evaluation("test")

    def num_train_at(self, epoch: int, batch_size: int | None = None) -> int:
        """Return the number of training images in this epoch, with batches of this size if it is given."""
        chosen = self._chosen("train", epoch, batch_size) if self.incremental is not None else None
        return self.num_train if chosen is None else len(chosen[1]())

    def follow_stages(self, starts: Sequence[int], of: int, epochs: int) -> None:
        """Let incremental data arrive with stages that start so in a run `of` epochs, stretched to this run's `epochs`.

        Until it is called all of the data is there.
        """
        self._arrival.follow_stages(starts, of, epochs)

    def samples_in_batches(self, epoch: int, batch_size: int) -> list[int]:
        """Return the number of images in each training batch of an epoch that has batches of this size.

        Raises:
            UserError: a pass over the images has fewer batches than `epoch_parts`.
        """
        return self._arrival.batch_sizes(self.num_train_at(epoch, batch_size), batch_size, epoch)

    @property
    def watched(self) -> str:
        """What `val_dataloader` gives images of: "val", or "test" with `validation="test"`."""
        return "test" if self.sets.validation == "test" else "val"

    @property
    def network_arguments(self) -> dict[str, Any]:
        """What a network has to know of the data."""
        return {"image_shape": list(self.image_shape), "num_classes": self.num_classes}

    def parts(self) -> list[Part]:
        """Features beside growing that this data needs: a head that grows with classes that arrive."""
        arriving = self.incremental
        if arriving is None or arriving.mode != "classes":
            return []
        from growlab.parts import Classes

        return [Classes(arriving.order(self.num_classes), partial(arriving.num_classes, self.num_classes))]

    def held_bytes(self) -> int:
        """Return the bytes of all images that a run holds on the training device, besides its batches."""
        held = [] if self._reading.in_memory is False else self._images.values()
        return sum(images.images_NHWC.nbytes for images in held if isinstance(images, ImageArray))

    def probe_batch(self, n: int) -> Tensor:
        """Return n training images, normalised, not augmented: float32 [n, C, H, W] on the CPU.

        Always the same ones, as many of each class as can be; repeated if there are fewer than n.
        """
        train = self._images["train"]
        positions = np.resize(first_balanced(train.labels, n), n)
        return self._normalisation.apply(train.read(positions).cpu(), self.channels_last)

    def _chosen(
        self, part: str, epoch: int, size: int | None = None
    ) -> tuple[Any, Callable[[], np.ndarray]] | None:
        labels = self._images[part].labels
        return self._arrival.chosen(
            part, labels, self.num_classes, epoch, size or self.global_batch_size(epoch)
        )

    def _current(self, part: str, epoch: int) -> Images:
        """The images of a part of the data, or those of the epoch's classes or stage."""
        chosen = self._chosen(part, epoch)
        if chosen is None:
            return self._images[part]
        key, positions = chosen
        if part not in self._of_task or self._of_task[part][0] != key:
            self._of_task[part] = (key, self._images[part].select(positions()))
        return self._of_task[part][1]

    def _evaluation(self, part: str) -> MemoryLoader | StreamLoader:
        rank, world_size = self._place()
        length = len(self._current(part, self._now))
        plan = EpochPlan(length, self.eval_batch_size, self.seed, 0, None, rank, world_size)
        return self._loader(part, plan, self._now)

    def _loader(self, part: str, plan: EpochPlan, epoch: int) -> MemoryLoader | StreamLoader:
        images = self._current(part, epoch)
        device = self._device
        training = plan.augmentation is not None
        if isinstance(images, ImageArray) and self._is_held(images, part):
            images = images.to(device)
            if part in self._of_task:
                self._of_task[part] = (self._of_task[part][0], images)
            else:
                self._images[part] = images
            return MemoryLoader(plan, self._normalisation, self.channels_last, images)
        if part in self._of_task:
            raise UserError(
                "data.class_schedule and data.incremental work with images in memory; set data.in_memory=true."
            )
        if part not in self._readers:
            draws = (self.augmentation, self.views.crop) if training else (None, None)
            workers = self._reading.num_workers
            if workers is None:
                workers = workers_of_rank(self.trainer.num_devices if self.trainer is not None else 1)
            batches = ImageBatches(images, self.seed, *draws)
            self._readers[part] = Readers(batches, workers, pinned=device.type == "cuda")
        return StreamLoader(plan, self._normalisation, self.channels_last, self._readers[part], device)
