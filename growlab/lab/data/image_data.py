"""The data module of labelled images."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from growlab import parts
from growlab.base.errors import UserError
from growlab.base.settings import not_none, whole
from growlab.lab.data.arrival import Arrival, Incremental, first_balanced, stratified_split
from growlab.lab.data.image_files import open_images
from growlab.lab.data.images import (
    Augmentation,
    Fit,
    ImageArray,
    Images,
    Interpolation,
    Normalisation,
    RandomCrop,
    image_statistics,
)
from growlab.lab.data.loaders import EpochPlan, ImageBatches, MemoryLoader, StreamLoader, WorkerPool, workers_of_rank
from growlab.lab.data.run_data import RunData
from growlab.parts import Part

# Size of the sample of a streamed set that estimates mean and standard deviation.
_SAMPLE = 4096
# Decoded images up to this many bytes are kept in memory by default.
_IN_MEMORY_BYTES = 2 << 30
_STREAMED = "images in memory; set data.in_memory=true."


class ImageData(RunData):
    """Labelled images, by name or from a folder, as augmented and normalised batches.

    A batch is (x float32 [B, C, H, W], y int64 [B]). Order and augmentation are functions of (seed, epoch, image)
    alone, so a resumed run and a run on another number of ranks see the same images. The attributes `num_classes`,
    `image_shape` (C, H, W), `num_train`, `num_val`, `num_test`, `mean` and `std` are known after `setup()`.

    Args:
        name: digits, cifar10, cifar100, mnist, fashion_mnist, or any name for data in `root`.
        root: folder with torchvision's files, Hugging Face Parquet files or `train/<class>/*.png`; None =
            `$GROWLAB_DATA/<name>`, else `~/.cache/growlab/<name>`; digits then come from scikit-learn.
        download: fetch the data if the folder is empty.
        batch_size: images in a training batch over all ranks; B_base in Eq. 8 of the growth schedule.
        eval_batch_size: most images in a validation or test batch over all ranks.
        seed: of order and augmentation.
        validation: "none"; "split": the data's own validation set if it has one as well as a test set, else part of
            the training set; "test": monitor the test set without selecting on it, and train on all training images.
        validation_fraction: fraction of the training set for "split", stratified by class.
        test_fraction: fraction of the training set to test on if the data have no test set, stratified by class; the
            images may then also be in `<class>/` in `root` itself. None: data without a test set are an error.
        split_seed: of these splits, independent of the seed of the run.
        limit_train: use at most this many training images, class-balanced, the first ones of each class.
        limit_test: likewise for the test set.
        on_error: "raise" ends the run at an image that cannot be decoded, such as a truncated file; "skip" decodes
            all images in class folders once and leaves out damaged ones with a warning.
        image_size: resize images to this many pixels square; None = as they are.
        resize_size: pixels of the shorter side before the centre is cropped to `image_size`; None = `image_size`.
        crop_scale: range of the area of random training crops, relative to the image; None = no random crops.
        crop_ratio: range of the aspect ratio (width over height) of these crops.
        interpolation: for resizing and crops: nearest, bilinear, bicubic, box, hamming or lanczos.
        shift: largest random shift of a training image in pixels.
        mirror: flip training images horizontally with probability 1/2.
        mean: per channel on the scale 0..1; None = computed from the training images.
        std: likewise.
        standardise: "channel"; or "feature": each pixel of each channel by its own mean and standard deviation over
            the training images, instead of `mean` and `std`.
        class_schedule: classes by epoch, for tasks that change during training: `{0: [0, 1], 10: [0, 1, 2]}` trains and
            validates on two classes at first and on three from epoch 10 on. Epochs keep their length (images of fewer
            classes are repeated); the test uses the last entry. None = all classes.
        incremental: fraction of the classes or images that each stage of the run has. None = all.
        epochs_per_pass: divide each pass over the training images into this many epochs of nearly equal length, for
            schedules, budgets and validation finer than a pass.
        in_memory: keep decoded images as one tensor on the training device; None = up to 2 GiB.
        num_workers: worker processes for images that are not in memory; None = one per core, at most 16.
        channels_last: memory layout of the batches.
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
        seed: int = 0,
        *,
        validation: Literal["none", "split", "test"] = "none",
        validation_fraction: float = 0.1,
        test_fraction: float | None = None,
        split_seed: int = 0,
        limit_train: int | None = None,
        limit_test: int | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        image_size: int | None = None,
        resize_size: int | None = None,
        crop_scale: Sequence[float] | None = None,
        crop_ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Interpolation = "bicubic",
        shift: int = 0,
        mirror: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        standardise: Literal["channel", "feature"] = "channel",
        class_schedule: Mapping[int, Sequence[int]] | None = None,
        incremental: Incremental | None = None,
        epochs_per_pass: int = 1,
        in_memory: bool | None = None,
        num_workers: int | None = 0,
        channels_last: bool = True,
    ) -> None:
        super().__init__(batch_size, seed)
        whole(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        whole(1, **not_none(limit_train=limit_train, limit_test=limit_test))
        whole(0, **not_none(num_workers=num_workers))
        self.name: str = name
        self.root, self.download, self.on_error = root, download, on_error
        self.eval_batch_size, self.channels_last = eval_batch_size, channels_last
        self.validation, self.split_seed = validation, split_seed
        self.validation_fraction, self.test_fraction = validation_fraction, test_fraction
        self.limit_train, self.limit_test = limit_train, limit_test
        self.fit = Fit(image_size, resize_size, interpolation)
        self.crop = None
        if crop_scale is not None:
            self.crop = RandomCrop(tuple(crop_scale), tuple(crop_ratio), interpolation)
        self.augmentation = Augmentation(shift, mirror)
        self.mean, self.std, self.standardise = mean, std, standardise
        self._arrival = Arrival(class_schedule, incremental, epochs_per_pass)
        self.incremental, self.epochs_per_pass = incremental, epochs_per_pass
        self.only_in_epochs = "data.class_schedule" if class_schedule else "data.incremental" if incremental else ""
        self.in_memory, self.num_workers = in_memory, num_workers
        self._images: dict[str, Images] = {}
        # For each part of the data, the subset of the current epoch: its key and images.
        self._subsets: dict[str, tuple[Any, Images]] = {}

    def _read(self) -> None:
        skip, without_test = self.on_error == "skip", self.test_fraction is not None
        images = open_images(self.name, self.root, self.download, self.fit, skip, without_test)
        train = images.pop("train")
        if "test" not in images:
            train, images["test"] = self._split(train, "test_fraction", self.test_fraction or 0.0)
        train = train.select(first_balanced(train.labels, self.limit_train or len(train)))
        if self.crop is None or isinstance(train, ImageArray):
            train = self._prepared(train)
        if self.validation != "split":
            images.pop("val", None)
        for name, part in images.items():
            chosen = first_balanced(part.labels, self.limit_test or len(part))
            images[name] = self._prepared(part.select(chosen))
        if self.validation == "split" and "val" not in images:
            train, images["val"] = self._split(train, "validation_fraction", self.validation_fraction)
        images["train"] = train
        height, width, channels = train.frame
        self.image_shape = (channels, height, width)
        self.num_classes = len(train.classes)
        if self.num_classes < 2:
            raise UserError(
                f"all training images are of one class, {train.classes[0]!r}: there is nothing to classify."
            )
        self.num_train, self.num_test = len(train), len(images["test"])
        self.num_val = 0 if self.validation == "none" else len(images[self.watched])
        self._arrival.check(self.num_classes)
        self._normalisation = self._normalisation_by(train, channels)
        self._images = images

    def test_on(self, other: "ImageData") -> None:
        """Use another data set's test images, or all images of a folder without parts, as the test set.

        They are normalised like the training images of this one.

        Raises:
            UserError: they have other classes or another size.
        """
        images = open_images(other.name, other.root, other.download, other.fit, other.on_error == "skip", True)
        test = images.get("test", images["train"])
        train = self._images["train"]
        if test.classes != train.classes:
            names = [", ".join(classes[:5]) for classes in (test.classes, train.classes)]
            raise UserError(
                f"these images are of {len(test.classes)} classes ({names[0]} ...), not the run's ({names[1]} ...)."
            )
        test = other._prepared(test.select(first_balanced(test.labels, other.limit_test or len(test))))
        if test.frame != train.frame:
            raise UserError(
                f"these images have the shape {tuple(test.frame)} (height, width, channels), the run's "
                f"{tuple(train.frame)}; resize them with data.image_size=N."
            )
        self._images["test"], self.num_test = test, len(test)

    def _prepared(self, images: Images) -> Images:
        """Resize images and decode those to keep in memory."""
        if isinstance(images, ImageArray):
            if self.fit.size is None:
                return images
            fitted = images.read(np.arange(len(images)), [self.fit] * len(images))
            return replace(images, images_NHWC=fitted)
        few = len(images) * int(np.prod(images.frame)) <= _IN_MEMORY_BYTES
        return images.decoded() if (few if self.in_memory is None else self.in_memory) else images

    def _is_in_memory(self, part: str) -> bool:
        """True if batches come from a tensor in memory; random crops are cut while images are decoded instead."""
        cropped = part == "train" and self.crop is not None
        return isinstance(self._images[part], ImageArray) and self.in_memory is not False and not cropped

    def _split(self, train: Images, key: str, fraction: float) -> tuple[Images, Images]:
        kept_N, held_out_N = stratified_split(train.labels, fraction, self.split_seed)
        if not len(kept_N) or not len(held_out_N):
            raise UserError(
                f"data.{key}={fraction} of {len(train)} training images leaves nothing to train or to "
                f"{'validate' if key == 'validation_fraction' else 'test'} on; choose another fraction."
            )
        return train.select(kept_N), train.select(held_out_N)

    def _normalisation_by(self, train: Images, channels: int) -> Normalisation:
        """Set `mean` and `std`, and return the normalisation."""
        if self.mean is None or self.std is None:
            if isinstance(train, ImageArray):
                sample = train.images_NHWC
            else:
                sample = train.read(first_balanced(train.labels, _SAMPLE))
            mean, std = (statistic.tolist() for statistic in image_statistics(sample))
            self.mean, self.std = (mean if self.mean is None else self.mean, std if self.std is None else self.std)
        self.mean, self.std = list(map(float, self.mean)), list(map(float, self.std))
        if {len(self.mean), len(self.std)} != {channels}:
            raise UserError(
                f"data.mean and data.std have {len(self.mean)} and {len(self.std)} numbers, the images {channels} "
                "channels."
            )
        if self.standardise == "channel":
            return Normalisation(self.mean, self.std)
        if not isinstance(train, ImageArray):
            raise UserError(f"data.standardise=feature works with {_STREAMED}")
        return Normalisation(*image_statistics(train.images_NHWC, "feature"))

    def training_batches(
        self, count: int, epoch: int | None = None, augmented: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the first training batches of an epoch, without random crops; see `RunData`."""
        epoch = self._now if epoch is None else epoch
        train, plan = self._current("train", epoch), self._plan(epoch, epoch)
        labels, batches = torch.from_numpy(train.labels), []
        for part in plan.batches()[:count]:
            images = train.read(part).cpu()
            if augmented:
                images = self.augmentation.apply(images, self.augmentation.draw(part, self.seed, epoch))
            batches.append((self._normalisation.apply(images, self.channels_last), labels[part]))
        return batches

    def training_loader(self, epoch: int, draw: int) -> MemoryLoader | StreamLoader:
        """Return the training batches of the images of `epoch`, with the order and augmentation of epoch `draw`."""
        return self._loader("train", self._plan(epoch, draw), epoch)

    def _plan(self, epoch: int, draw: int) -> EpochPlan:
        return self._training_plan(len(self._current("train", epoch)), epoch, draw)

    def num_train_at(self, epoch: int, batch_size: int | None = None) -> int:
        """Return the number of training images in this epoch, with `batch_size` in place of the epoch's own."""
        if self.incremental is None:
            return self.num_train
        size = batch_size or self.global_batch_size(epoch)
        return len(self._positions("train", self._arrival.key(epoch, size)))

    def follow_stages(self, starts: Sequence[int], of: int, epochs: int) -> None:
        """Set the stages at which incremental data arrive; see `RunData`."""
        self._arrival.follow_stages(starts, of, epochs)

    @property
    def watched(self) -> str:
        """Part that `val_dataloader` reads: "val", or "test" with `validation="test"`."""
        return "test" if self.validation == "test" else "val"

    @property
    def network_arguments(self) -> dict[str, Any]:
        """`image_shape` [C, H, W] and `num_classes`."""
        return {"image_shape": list(self.image_shape), "num_classes": self.num_classes}

    def parts(self) -> list[Part]:
        """Return a head that grows with the classes, if these arrive in stages."""
        arriving = self.incremental
        if arriving is None or arriving.mode != "classes":
            return []
        return [parts.Classes(arriving.order(self.num_classes), partial(arriving.num_classes, self.num_classes))]

    def held_bytes(self) -> int:
        """Return the bytes of all images that a run keeps on the training device."""
        kept = [] if self.in_memory is False else self._images.values()
        return sum(images.images_NHWC.nbytes for images in kept if isinstance(images, ImageArray))

    def probe_batch(self, n: int) -> Tensor:
        """Return n fixed training images, normalised, not augmented: float32 [n, C, H, W] on the CPU.

        They are class-balanced, and repeated if there are fewer than n.
        """
        train = self._images["train"]
        positions = np.resize(first_balanced(train.labels, n), n)
        return self._normalisation.apply(train.read(positions).cpu(), self.channels_last)

    def _positions(self, part: str, key: Any) -> np.ndarray:
        return self._arrival.positions(part, self._images[part].labels, self.num_classes, key)

    def _current(self, part: str, epoch: int) -> Images:
        """Return the images of a part of the data, restricted to the epoch's classes or stage."""
        key = self._arrival.key(epoch, self.global_batch_size(epoch))
        if key is None:
            return self._images[part]
        if not self._is_in_memory(part):
            raise UserError(f"data.class_schedule and data.incremental work with {_STREAMED}")
        if part not in self._subsets or self._subsets[part][0] != key:
            self._subsets[part] = (key, self._images[part].select(self._positions(part, key)))
        return self._subsets[part][1]

    def evaluation(self, part: str) -> MemoryLoader | StreamLoader:
        """Return the batches of "val" or "test", in order."""
        length = len(self._current(part, self._now))
        return self._loader(part, self._evaluation_plan(length, self.eval_batch_size), self._now)

    def _loader(self, part: str, plan: EpochPlan, epoch: int) -> MemoryLoader | StreamLoader:
        device = self._device
        if self._is_in_memory(part):
            current = self._current(part, epoch)
            assert isinstance(current, ImageArray)
            images = current.to(device)
            if part in self._subsets:
                self._subsets[part] = (self._subsets[part][0], images)
            else:
                self._images[part] = images
            return MemoryLoader(plan, images, self.augmentation, self._normalisation, self.channels_last)
        if part not in self._workers:
            workers = self.num_workers
            if workers is None:
                workers = workers_of_rank(self.trainer.num_devices if self.trainer is not None else 1)
            batches = ImageBatches(self._images[part], self.seed, self.augmentation, self.crop)
            self._workers[part] = WorkerPool(batches, workers, pinned=device.type == "cuda")

        def finish(batch: tuple[Tensor, Tensor], number: int) -> tuple[Tensor, Tensor]:
            # Transfer uint8, a quarter of the bytes of float32, and normalise on the device.
            images_BHWC, y_B = (tensor.to(device, non_blocking=True) for tensor in batch)
            return self._normalisation.apply(images_BHWC, self.channels_last), y_B

        return StreamLoader(plan, self._workers[part], finish)
