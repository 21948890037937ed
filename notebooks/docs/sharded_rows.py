"""Measure memory and bytes of a growth event of a sharded Llama, in two CPU processes, at four sizes.

`python notebooks/docs/sharded_rows.py` writes notebooks/results/sharded/results.json (a few minutes on two CPU cores).
Each size is an event from half to full width in float32 with AdamW's moments. A thread reads each process's resident
memory every millisecond; the peak is counted above the larger of the memory before and after the event. A second event
counts the bytes of collectives and of all operations. Llama 2 7B and 70B are traced on device meta, to count their
parameters before and after an event; and a seed of a quarter of 7B's width is traced, sharded and drawn, as by one of
8 processes.
"""

import ctypes
import gc
import json
import resource
import tempfile
import threading
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from growlab import Grower, HyperCloning
from growlab.base.files import write_json
from growlab.lab.training.run import provenance
from growlab.widths import trace

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "notebooks" / "results" / "sharded" / "results.json"
RANKS, SEED, MIB = 2, 0, 2**20
#: Width of the stream, number of layers.
SIZES = [(512, 8), (1024, 4), (1024, 8), (2048, 4)]
#: Sizes of Llama 2, with the number of processes that train it.
LARGE = {
    "7B": (
        8,
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
    "70B": (
        64,
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
}


class Counted(TorchDispatchMode):
    """Counts bytes that collectives give to this process, and bytes that operations read and write.

    Attributes:
        of_state: gathered one tensor at a time, to grow weights and moments.
        of_forwards: gathered by FSDP2 in forward passes.
        touched: inputs and outputs of other operations, except views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_state = self.of_forwards = self.touched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.of_state += out.nbytes
        elif func is torch.ops.c10d._allgather_base_.default:
            self.of_forwards += args[0].nbytes
        elif func.namespace == "aten" and not any(
            r.alias_info and not r.alias_info.is_write for r in func._schema.returns
        ):
            self.touched += sum(
                leaf.nbytes
                for leaf in tree_leaves((args, out))
                if type(leaf) in (Tensor, nn.Parameter) and not leaf.is_meta
            )
        return out


def resident() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def give_memory_back() -> None:
    """Let the C library return freed tensors to the system at once, as MALLOC_MMAP_THRESHOLD_=262144 does."""
    ctypes.CDLL(None).mallopt(-3, 1 << 18)


def shard(network: Any) -> None:
    """Shard a Llama by layers."""
    for layer in network.model.layers:
        fully_shard(layer)
    fully_shard(network)


def begin(rank: int, folder: str, width: int, layers: int) -> tuple[Any, Grower, Any]:
    """Return a sharded Llama of half its width that has trained for a step, its Grower and its optimizer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(SEED)
    sizes: Any = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    heads: Any = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 256, "use_cache": False}
    with torch.device("meta"):
        network = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    tokens = torch.randint(256, (2, 8))
    method = HyperCloning(noise_std=0.1)
    grower = Grower(network, tokens, method=method, trigger={0: 0.5, 1: 1.0}, seed=SEED, shard=shard, verbose=False)
    optimizer = torch.optim.AdamW(network.parameters())
    grower.follow(optimizer)
    grower.step(epoch=0)
    network(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    network.reshard()
    return network, grower, optimizer


def measure(rank: int, folder: str, width: int, layers: int) -> None:
    """Measure the memory of an event; each process writes its row."""
    give_memory_back()
    network, grower, _optimizer = begin(rank, folder, width, layers)
    gc.collect()
    before, peak, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], resident())

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.perf_counter()
    grower.step(epoch=1)
    seconds = time.perf_counter() - began
    done.set()
    watching.join()
    gc.collect()
    network.reshard()
    above = peak[0] - max(before, resident())
    largest = max(p.numel() * p.element_size() for p in network.parameters())
    row = {
        "rank": rank, "hidden_size": width, "layers": layers,
        "parameters": sum(p.numel() for p in network.parameters()), "largest_MiB": largest / MIB,
        "above_MiB": above / MIB, "tensors_above": above / largest, "seconds": seconds,
    }  # fmt: skip
    write_json(Path(folder) / f"{rank}.json", row)
    dist.destroy_process_group()


def count(rank: int, folder: str, width: int, layers: int) -> None:
    """Count the bytes of an event; each process writes its row."""
    network, grower, _optimizer = begin(rank, folder, width, layers)
    old = sum(p.numel() for p in network.parameters())
    with Counted() as counted:
        grower.step(epoch=1)
    new = sum(p.numel() for p in network.parameters())
    row = {
        "rank": rank, "hidden_size": width, "layers": layers, "parameters_before": old, "parameters": new,
        "gathered_state": counted.of_state / (4 * old), "gathered_forwards": counted.of_forwards / (4 * (old + new)),
        "touched": counted.touched / (4 * 3 * new),
    }  # fmt: skip
    write_json(Path(folder) / f"{rank}.json", row)
    dist.destroy_process_group()


def large(name: str) -> dict[str, Any]:
    """Count parameters of a Llama before and after an event; measure time and memory of tracing it."""
    processes, sizes = LARGE[name]
    began = time.perf_counter()
    with torch.device("meta"):
        network = LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes))
    graph = trace(network, torch.zeros(2, 8, dtype=torch.long, device="meta"))
    half = {group: width // 2 for group, width in graph.full_widths.items()}
    counts = [prod(graph.shape(n, half) if n in graph.axes else p.shape) for n, p in network.named_parameters()]
    return {
        "network": name, "processes": processes, "parameters_before": sum(counts),
        "parameters": sum(p.numel() for p in network.parameters()),
        "largest": max(p.numel() for p in network.parameters()), "trace_seconds": time.perf_counter() - began,
        "resident_GB": resident() / 1e9,
    }  # fmt: skip


def seed(rank: int, folder: str, name: str) -> None:
    """Measure time and memory of making a Llama's seed on device meta, in one of its processes."""
    give_memory_back()
    processes, sizes = LARGE[name]
    dist.init_process_group("fake", rank=rank, world_size=processes, store=FakeStore())
    began, used = time.perf_counter(), time.process_time()
    with torch.device("meta"):
        network = LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes))
    tokens, method = torch.zeros(2, 8, dtype=torch.long), HyperCloning(noise_std=0.1)
    Grower(network, tokens, method=method, trigger={0: 0.25, 1: 1.0}, seed=SEED, shard=shard, verbose=False)
    row = {
        "network": name, "processes": processes, "parameters": sum(p.numel() for p in network.parameters()),
        "seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used,
        "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }  # fmt: skip
    write_json(Path(folder) / f"{rank}.json", row)
    dist.destroy_process_group()


def in_processes(job: Any, *about: Any, processes: int = RANKS) -> list[Any]:
    """Rows of a job, one of each process."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(job, (folder, *about), nprocs=processes)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]


def main() -> None:
    """Measure all sizes, and write their rows."""
    rows: dict[str, list[Any]] = {"rows": [], "counts": []}
    for width, layers in SIZES:
        rows["rows"] += in_processes(measure, width, layers)
    for width, layers in SIZES[:3]:
        rows["counts"] += in_processes(count, width, layers)
    rows["large"] = [large(name) for name in LARGE]
    rows["seed"] = in_processes(seed, "7B", processes=1)
    about = {"command": "python notebooks/docs/sharded_rows.py", "ranks": RANKS, "seed": SEED}
    ROWS.parent.mkdir(exist_ok=True)
    write_json(ROWS, {**about, **provenance(torch.device("cpu")), **rows})


if __name__ == "__main__":
    main()
