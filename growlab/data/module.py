"""The Lightning data module for labelled images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor

from growlab.data.arguments import check_numbers
from growlab.data.augment import Augmentation
from growlab.data.cache import held
from growlab.data.class_schedule import ClassSchedule, positions_of
from growlab.data.crops import views
from growlab.data.images import EncodedImages, ImageArray, Images
from growlab.data.incremental import Incremental
from growlab.data.loaders import EpochPlan, MemoryLoader, StreamLoader, part_of_pass
from growlab.data.readers import ImageBatches, Readers, workers_of_rank
from growlab.data.sources import open_images
from growlab.data.split import first_balanced, stratified_split
from growlab.data.statistics import channel_statistics, normalisation, sample_of
from growlab.errors import UserError
from growlab.parts import Part

VALIDATIONS = ("none", "split", "test")


class ImageData(LightningDataModule):
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
        shift: largest random shift of a training image in pixels, padded with zeros; 0 = none.
        mirror: whether training images are mirrored left to right with chance 1/2.
        mean: of each channel on the scale 0..1; None = computed from the training images.
        std: likewise.
        standardise: "channel", or "feature": every pixel of every channel by its own mean and deviation over the
            training images, in the place of `mean` and `std`.
        class_schedule: classes by epoch, for tasks that change while a network trains: `{0: [0, 1], 10: [0, 1, 2]}`
            trains and validates on two classes at first and on three from epoch 10 on, with as many images an
            epoch (those of fewer classes are repeated); the test takes the last ones. None = all classes.
        incremental: what part of the classes or images each stage of the run has; see `Incremental`. None = all.
        validation: "none"; "split": part of the training set; "test": the test set, watched under this name and not
            selected on, so that all training images are trained on.
        validation_fraction: the part that "split" takes.
        split_seed: decides which images "split" takes, whatever the seed of the run.
        limit_train: use only so many training images, the first ones of each class.
        limit_test: likewise of the test set.
        image_size: bring images to this many pixels square; None = as they are.
        resize_size: pixels of the shorter side before the centre is cropped to `image_size`; None = the same.
        crop_scale: least and largest area, relative to the image, of the random crops that are trained on; None
            = no random crops.
        crop_ratio: least and largest width over height of these crops.
        interpolation: how images and crops are scaled, one of `growlab.data.crops.INTERPOLATIONS`.
        channels_last: memory layout of the batches.
        seed: of order and augmentation.
        in_memory: hold decoded images as one tensor on the training device; None = up to 2 GiB.
        num_workers: processes that read images if they are not held in memory; None = one a core, at most 16.
        shuffle_window: images of Parquet files above 2 GiB that are shuffled together; they are read row group
            by row group, and as many are held in memory, encoded.
        epoch_parts: divide each pass over the training images into so many epochs of nearly equal length, so that
            schedules, budgets and validation are finer than a pass.

    Raises:
        UserError: an argument cannot be used; from `setup()` also, the data cannot be found or read.
    """

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
        shift: int = 0,
        mirror: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        standardise: str = "channel",
        class_schedule: Mapping[int, Sequence[int]] | None = None,
        incremental: Incremental | None = None,
        validation: str = "none",
        validation_fraction: float = 0.1,
        split_seed: int = 0,
        limit_train: int | None = None,
        limit_test: int | None = None,
        image_size: int | None = None,
        resize_size: int | None = None,
        crop_scale: Sequence[float] | None = None,
        crop_ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: str = "bicubic",
        channels_last: bool = True,
        seed: int = 0,
        in_memory: bool | None = None,
        num_workers: int | None = 0,
        shuffle_window: int = 8192,
        epoch_parts: int = 1,
    ) -> None:
        super().__init__()
        check_numbers(
            1, batch_size=batch_size, eval_batch_size=eval_batch_size, shuffle_window=shuffle_window
        )
        check_numbers(1, epoch_parts=epoch_parts)
        check_numbers(0, shift=shift, num_workers=num_workers)
        check_numbers(1, limit_train=limit_train, limit_test=limit_test)
        check_numbers(1, image_size=image_size, resize_size=resize_size)
        if validation not in VALIDATIONS:
            raise UserError(
                f"data.validation={validation} is unknown; choose one of {', '.join(VALIDATIONS)}."
            )
        if not 0 < validation_fraction < 1:
            raise UserError(f"data.validation_fraction={validation_fraction} must lie between 0 and 1.")
        self.name, self.root, self.download = name, root, download
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.augmentation = Augmentation(shift, mirror)
        self.validation, self.validation_fraction, self.split_seed = (
            validation,
            validation_fraction,
            split_seed,
        )
        self.limit_train, self.limit_test = limit_train, limit_test
        self.fit, self.crop = views(image_size, resize_size, crop_scale, crop_ratio, interpolation)
        if self.crop is not None and in_memory:
            raise UserError(
                "random crops (data.crop_scale) are cut from the images as they lie in their files; leave out "
                "data.in_memory=true."
            )
        self.channels_last, self.seed = channels_last, seed
        self.in_memory, self.num_workers, self.shuffle_window = in_memory, num_workers, shuffle_window
        self.mean = [float(value) for value in mean] if mean is not None else None
        self.std = [float(value) for value in std] if std is not None else None
        #: Global batch size of an epoch, set by the experiment from the growth schedule; None = `batch_size`.
        self.batch_size_at_epoch: Callable[[int], int] | None = None
        # First epoch of each stage, epochs that these are of, and the run's own.
        self._stages: tuple[Sequence[int], int, int] = ((0,), 1, 1)
        self._images: dict[str, Images] = {}
        self._readers: dict[str, Readers] = {}
        if standardise not in ("channel", "feature"):
            raise UserError(f"data.standardise must be channel or feature, not {standardise}.")
        self.standardise, self._classes = standardise, ClassSchedule(class_schedule)
        self.incremental, self.epoch_parts = incremental, epoch_parts
        if incremental is not None and epoch_parts > 1:
            raise UserError(
                "data.epoch_parts goes with data that is all there from the start: leave it at 1."
            )
        if incremental is not None and self._classes.tasks:
            raise UserError(
                "data.class_schedule and data.incremental both say what an epoch is about; set one."
            )
        # Part of the data, what it was chosen by, and the images themselves.
        self._of_task: dict[str, tuple[Any, Images]] = {}

    def prepare_data(self) -> None:
        """Fetch and decode what is not there yet; Lightning calls this in one process a machine."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Read the data, once, whatever the stage."""
        if self.validation == "none" and self.trainer is not None:
            # Else Lightning warns of an empty list, and likewise if the method were missing.
            self.trainer.limit_val_batches = 0
        if self._images:
            return
        images = self._open()
        train = images.pop("train")
        train = train.select(first_balanced(train.labels, self.limit_train or len(train)))
        if self.crop is None or isinstance(train, ImageArray):
            train = self._held(train)
        if self.validation != "split":
            images.pop("val", None)
        for name, part in images.items():
            chosen = part.select(first_balanced(part.labels, self.limit_test or len(part)))
            images[name] = self._held(chosen)
            frame = images[name].frame
            if train.frame != frame:
                raise UserError(
                    f"{name} images have the shape {astuple(frame)}, training images {astuple(train.frame)} "
                    "(height, width, channels); bring them to one size with data.image_size=N."
                )
        images["train"], test = train, images["test"]
        if self.validation == "split" and "val" not in images:
            images["train"], images["val"] = self._split(train)
        height, width, channels = astuple(train.frame)
        self.image_shape = (channels, height, width)
        self.num_classes = len(train.classes)
        self.num_train, self.num_test = len(images["train"]), len(test)
        self.num_val = {"none": 0, "split": len(images.get("val", ())), "test": len(test)}[self.validation]
        self._classes.check(self.num_classes)
        self._set_statistics(images["train"])
        self._images = images

    def _held(self, images: Images) -> Images:
        """Decoded, if they are to be held in memory, and of one size."""
        if isinstance(images, ImageArray):
            return images.fitted(self.fit)
        return held(images, self.in_memory)

    def _open(self) -> dict[str, Images]:
        """The training and the test set, and a validation set where the data has its own."""
        train, test = open_images(self.name, self.root, self.download, self.fit)
        return {"train": train, "test": test}

    def teardown(self, stage: str | None = None) -> None:
        """End the processes that read images."""
        for readers in self._readers.values():
            readers.close()
        self._readers.clear()

    def train_dataloader(self) -> MemoryLoader | StreamLoader:
        """Return the batches of the trainer's current epoch (0 without a trainer).

        Raises:
            UserError: the number of processes does not divide the batch size.
        """
        return self.training_images(self._now, self._now)

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

    def training_images(self, epoch: int, draw: int) -> MemoryLoader | StreamLoader:
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
        rank, world_size = self._place()
        if batch_size % world_size:
            raise UserError(
                f"a batch of {batch_size} images does not divide among {world_size} processes; choose a "
                f"data.batch_size that {world_size} divides, or another number of devices."
            )
        train = self._current("train", epoch)
        blocks_N = train.blocks_N if isinstance(train, EncodedImages) else None
        return EpochPlan(
            *(len(train), batch_size, self.seed, draw, self.augmentation, rank, world_size),
            *(blocks_N, self.shuffle_window, self.epoch_parts),
        )

    def val_dataloader(self) -> MemoryLoader | StreamLoader | list:
        """Return the validation images in order; an empty list without validation."""
        if self.validation == "none":
            return []
        return self._evaluation(self.watched)

    def test_dataloader(self) -> MemoryLoader | StreamLoader:
        """Return the test images in order."""
        return self._evaluation("test")

    def global_batch_size(self, epoch: int) -> int:
        """Return the number of images in a training batch of this epoch, over all ranks."""
        return self.batch_size_at_epoch(epoch) if self.batch_size_at_epoch is not None else self.batch_size

    def num_train_at(self, epoch: int, batch_size: int | None = None) -> int:
        """Return the number of training images in this epoch, with batches of this size if it is given."""
        chosen = self._chosen("train", epoch, batch_size) if self.incremental is not None else None
        return self.num_train if chosen is None else len(chosen[1]())

    def follow_stages(self, starts: Sequence[int], of: int, epochs: int) -> None:
        """Let incremental data arrive with stages that start so in a run `of` epochs, stretched to this run's `epochs`.

        Until it is called all of the data is there.
        """
        self._stages = (tuple(starts), of, epochs)

    def samples_in_batches(self, epoch: int, batch_size: int) -> list[int]:
        """Return the number of images in each training batch of an epoch that has batches of this size.

        Raises:
            UserError: a pass over the images has fewer batches than `epoch_parts`.
        """
        whole, rest = divmod(self.num_train_at(epoch, batch_size), batch_size)
        batches = [batch_size] * whole + [rest] * bool(rest)
        if len(batches) < self.epoch_parts:
            raise UserError(
                f"data.epoch_parts={self.epoch_parts} leaves epochs without a batch: a pass over the training images "
                f"has {len(batches)} batches of {batch_size}."
            )
        return batches[part_of_pass(len(batches), epoch, self.epoch_parts)]

    @property
    def watched(self) -> str:
        """What `val_dataloader` gives images of: "val", or "test" with `validation="test"`."""
        return "test" if self.validation == "test" else "val"

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
        held = [] if self.in_memory is False else self._images.values()
        return sum(images.images_NHWC.nbytes for images in held if isinstance(images, ImageArray))

    def probe_batch(self, n: int) -> Tensor:
        """Return n training images, normalised, not augmented: float32 [n, C, H, W] on the CPU.

        Always the same ones, as many of each class as can be; repeated if there are fewer than n.
        """
        train = self._images["train"]
        positions = np.resize(first_balanced(train.labels, n), n)
        return self._normalisation.apply(train.read(positions).cpu(), self.channels_last)

    def _split(self, train: Images) -> tuple[Images, Images]:
        kept, held_out = stratified_split(train.labels, self.validation_fraction, self.split_seed)
        if not len(kept) or not len(held_out):
            raise UserError(
                f"data.validation_fraction={self.validation_fraction} of {len(train)} training images leaves "
                "nothing to train or to validate on; choose another fraction."
            )
        return train.select(kept), train.select(held_out)

    def _set_statistics(self, train: Images) -> None:
        if self.mean is None or self.std is None:
            mean, std = channel_statistics(sample_of(train))
            self.mean, self.std = self.mean or mean, self.std or std
        self._normalisation = normalisation(
            train, self.mean, self.std, self.image_shape[0], self.standardise == "feature"
        )

    def _chosen(self, part: str, epoch: int, size: int | None = None) -> tuple[Any, Any] | None:
        """What the images of an epoch are chosen by, and how to find their positions; None for all images."""
        labels, classes = self._images[part].labels, self._classes.at(epoch)
        if classes is not None:
            return classes, partial(positions_of, labels, classes, len(labels) if part == "train" else None)
        if self.incremental is None:
            return None
        starts, of, epochs = self._stages
        stage = max(s for s, start in enumerate(starts) if start <= epoch * of // epochs)
        key = (stage, len(starts), size or self.global_batch_size(epoch))
        return key, partial(self.incremental.positions, part, labels, self.num_classes, *key)

    def _current(self, part: str, epoch: int) -> Images:
        """The images of a part of the data, or those of the epoch's classes or stage."""
        chosen = self._chosen(part, epoch)
        if chosen is None:
            return self._images[part]
        key, positions = chosen
        if part not in self._of_task or self._of_task[part][0] != key:
            self._of_task[part] = (key, self._images[part].select(positions()))
        return self._of_task[part][1]

    @property
    def _now(self) -> int:
        return self.trainer.current_epoch if self.trainer is not None else 0

    def _place(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _evaluation(self, part: str) -> MemoryLoader | StreamLoader:
        rank, world_size = self._place()
        length = len(self._current(part, self._now))
        plan = EpochPlan(length, self.eval_batch_size, self.seed, 0, None, rank, world_size)
        return self._loader(part, plan, self._now)

    def _loader(self, part: str, plan: EpochPlan, epoch: int) -> MemoryLoader | StreamLoader:
        images = self._current(part, epoch)
        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        training = plan.augmentation is not None
        cropped = training and self.crop is not None
        if isinstance(images, ImageArray) and self.in_memory is not False and not cropped:
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
            draws = (self.augmentation, self.crop) if training else (None, None)
            workers = self.num_workers
            if workers is None:
                workers = workers_of_rank(self.trainer.num_devices if self.trainer is not None else 1)
            batches = ImageBatches(images, self.seed, *draws)
            self._readers[part] = Readers(batches, workers, pinned=device.type == "cuda")
        return StreamLoader(plan, self._normalisation, self.channels_last, self._readers[part], device)
