"""Grow a Llama that is sharded by FSDP2 over one device, by `Grower(shard=...)`."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from growlab import Grower
from growlab.base.files import write_json
from tests.benchmarks.ratios import llama, tokens, train_step


def main() -> None:
    """Grow once, with a training step before and after, and write the receipt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", type=Path, required=True)
    given = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29519")
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    mesh = dist.device_mesh.init_device_mesh(given.device, (1,))

    def shard(model: torch.nn.Module) -> None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    network, x = llama(2, 64).to(given.device), tokens(16, 1000)().to(given.device)
    grower = Grower(network, x, trigger={0: 0.5, 1: 1.0}, shard=shard, verbose=False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    grower.follow(optimizer)
    for epoch in range(2):
        grower.step(epoch=epoch)
        train_step(network, optimizer, x)
    (event,) = grower.events
    print(f"grown from {event.num_params_before:,} to {event.num_params:,} parameters in {event.seconds:.2f} s")
    write_json(
        given.write,
        {
            "seconds": event.seconds,
            "parity_error_eval": event.parity_error_eval,
            "parity_error_train": event.parity_error_train,
        },
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
