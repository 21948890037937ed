"""ResNet-20 on CIFAR-10 for a fixed number of seconds: full, smaller, grown in depth, grown in image size."""

import argparse
import io
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import At, Grower, Never, parts
from growlab.base.files import write_json
from growlab.lab.networks import CifarResNet
from growlab.optim import SGD

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("full", "smaller", "grown in depth", "grown in images")
# Fraction of the time at which networks grow.
GROWN_AT = 0.6
BATCH = 256


def images(split: str, limit: int) -> tuple[Tensor, Tensor]:
    """Images of CIFAR-10, uint8 [N, 3, 32, 32], and labels; random ones if it is not found."""
    folders = [Path(os.environ.get("GROWLAB_DATA", "/")) / "cifar10", ROOT / "shared/data/cifar10"]
    folders.append(ROOT.parent / "shared/data/cifar10")
    try:
        import PIL.Image
        import pyarrow.parquet as pq
        from torchvision.transforms.functional import pil_to_tensor

        path = next(folder / f"{split}.parquet" for folder in folders if (folder / f"{split}.parquet").is_file())
        rows = pq.read_table(path).slice(0, limit).to_pydict()
    except (ImportError, StopIteration) as error:
        print(f"random images: {error!r}")
        source = torch.Generator().manual_seed(len(split))
        labels = torch.randint(10, (min(limit, 10_000),), generator=source)
        return torch.randint(256, (len(labels), 3, 32, 32), generator=source, dtype=torch.uint8), labels
    picture, label = list(rows)[:2]
    pixels = [pil_to_tensor(PIL.Image.open(io.BytesIO(each["bytes"])).convert("RGB")) for each in rows[picture]]
    return torch.stack(pixels), torch.tensor(rows[label])


def made(way: str, width: int) -> tuple[nn.Module, dict[str, Any]]:
    """Network, and arguments of `Grower` to grow it by the fraction of time."""
    channels = (width, 2 * width, 4 * width)
    # ResNet-20 and ResNet-8; ResNet-14 to test the script.
    blocks = 1 if way == "smaller" else 3 if width > 4 else 2
    network = CifarResNet(blocks, num_classes=10, channels=channels)
    late = At({0: 1.0, GROWN_AT: 1.0}, unit="cost")
    if way == "grown in depth":
        return network, {"trigger": late, "parts": [parts.Depth()]}
    if way == "grown in images":
        return network, {"trigger": late, "parts": [parts.Resolution([24, 32])]}
    return network, {"trigger": Never()}


def trained(way: str, width: int, seconds: float, seed: int, train: Any, test: Any) -> dict[str, Any]:
    """Train for a number of seconds, with a rate that falls to 0 over the last half, and test."""
    (x, y), device = train, train[0].device
    torch.manual_seed(seed)
    network, growing = made(way, width)
    network = network.to(device, memory_format=torch.channels_last)
    grower = Grower(network, x[:16], seed=seed, verbose=False, **growing)
    optimizer = SGD(network.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4)
    grower.follow(optimizer)
    began, steps, order = time.perf_counter(), 0, torch.empty(0, dtype=torch.long)
    batch = BATCH if seconds else 8
    # 0 seconds, to test the script: eight steps.
    while (part := (time.perf_counter() - began) / seconds if seconds else steps / 8) < 1:
        if len(order) < batch:
            order = torch.randperm(len(x), device=device)
        chosen, order = order[:batch], order[batch:]
        grower.step(cost=part)
        network.train()
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * min(1.0, 2 * (1 - part))
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(network(augmented(x[chosen])), y[chosen])
        loss.backward()
        optimizer.step()
        steps += 1
        if steps % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()
    events = [(event.stage, round(event.seconds, 3)) for event in grower.events]
    network = grower.finish(at_any_stage=True).eval()
    with torch.no_grad():
        right = [(network(x).argmax(1) == y).sum() for x, y in zip(*(t.split(1000) for t in test), strict=True)]
    accuracy = float(sum(right)) / len(test[1])
    return {"way": way, "seed": seed, "steps": steps, "accuracy": accuracy, "events": events}


def augmented(x: Tensor) -> Tensor:
    """Shift and mirror a batch at random, in the same way for all images."""
    dy, dx, mirrored = torch.randint(9, (3,)).tolist()
    x = F.pad(x, (4, 4, 4, 4))[:, :, dy : dy + 32, dx : dx + 32]
    return x.flip(3) if mirrored % 2 else x


def main() -> None:
    """Train every way with two seeds at once, in two processes on one device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--write", type=Path, required=True)
    given = parser.parse_args()
    seconds, width, limit = (0.0, 4, 300) if given.small else (13.0, 16, 50_000)
    loaded = images("train", limit), images("test", limit)
    rows: list[dict[str, Any]] = []
    context = torch.multiprocessing.get_context("spawn")
    # Pass images by a file, since shared memory is small in many containers.
    with tempfile.TemporaryDirectory() as folder, context.Pool(2) as pool:
        torch.save(loaded, file := Path(folder) / "images.pt")
        for way in WAYS:
            jobs = [pool.apply_async(job, (way, width, seconds, seed, file, given.device)) for seed in range(2)]
            rows += [each.get() for each in jobs]
            mean_accuracy = statistics.mean(row["accuracy"] for row in rows[-2:])
            print(f"{way}: {100 * mean_accuracy:.2f} %", [row["steps"] for row in rows[-2:]], flush=True)
            write_json(given.write, {"seconds": seconds, "images": len(loaded[0][1]), "rows": rows})


def job(way: str, width: int, seconds: float, seed: int, file: Path, device: str) -> dict[str, Any]:
    """Train in a worker process."""
    torch.set_num_threads(1)
    known = [(x.to(device), y.to(device)) for x, y in torch.load(file, weights_only=True)]
    some = known[0][0][:5000].float()
    mean, std = some.mean((0, 2, 3), keepdim=True), some.std((0, 2, 3), keepdim=True)
    layout = torch.channels_last
    train, test = (((x.float() - mean) / std).contiguous(memory_format=layout) for x, _ in known)
    train, test = (train, known[0][1]), (test, known[1][1])
    if device != "cpu":
        # Kernels are chosen and loaded before the clock starts.
        trained(way, width, 0.3, seed, train, test)
    return trained(way, width, seconds, seed, train, test)


if __name__ == "__main__":
    main()
