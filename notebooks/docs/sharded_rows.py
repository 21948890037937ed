"""Measures how much memory a growth event of a sharded Llama takes, on two processes of the CPU, for four sizes.

`python notebooks/docs/sharded_rows.py` writes notebooks/results/sharded/results.json (a few minutes on two CPU cores).
Each size is an event from half to full width in float32 with AdamW's moments; a thread reads each process's resident
memory every millisecond. The peak is counted above the larger of the memory before and after the event.
"""

import ctypes
import gc
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from growlab import Grower, HyperCloning
from growlab.base.files import write_json
from growlab.lab.training.run import provenance

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "notebooks" / "results" / "sharded" / "results.json"
RANKS, SEED, MIB = 2, 0, 2**20
#: Width of the stream, number of layers.
SIZES = [(512, 8), (1024, 4), (1024, 8), (2048, 4)]


def resident() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def shard(network: Any) -> None:
    """Shard a Llama by layers."""
    for layer in network.model.layers:
        fully_shard(layer)
    fully_shard(network)


def measure(rank: int, folder: str, width: int, layers: int) -> None:
    """Measure one event; each process writes its row."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 18)  # freed tensors go back to the system
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


def main() -> None:
    """Measure all sizes, and write their rows."""
    import json

    rows = []
    for width, layers in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (folder, width, layers), nprocs=RANKS)
            rows += [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
        print(rows[-2:], flush=True)
        about = {"command": "python notebooks/docs/sharded_rows.py", "ranks": RANKS, "seed": SEED}
        ROWS.parent.mkdir(exist_ok=True)
        write_json(ROWS, {**about, **provenance(torch.device("cpu")), "rows": rows})


if __name__ == "__main__":
    main()
