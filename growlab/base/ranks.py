"""Exchange values between the processes of a distributed run, and check that they have the same bits.

Without an initialised `torch.distributed` there is one process, and nothing is sent.
"""

import hashlib
from collections.abc import Iterable, Iterator
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from growlab.base.errors import UserError
from growlab.base.pieces import nobody_else_has, whole

# Words per block of a checksum: weights of words repeat in each block, which has a factor of its own.
_BLOCK = 1 << 16
_NAMED = 3


def several() -> bool:
    """Return True if several processes train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def gather(content: Any) -> list[Any]:
    """Gather every rank's picklable object, in the order of ranks."""
    if not several():
        return [content]
    contents: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(contents, content)
    return contents


def stacked(tensor: Tensor) -> Tensor:
    """Stack every rank's tensor of the same shape: [ranks, ...]."""
    if not several():
        return tensor[None]
    tensors = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(tensors, tensor)
    return torch.stack(tensors)


def agreed(numbers: list[float]) -> list[float]:
    """Element-wise maximum over all ranks, so that all decide the same; NaN if any rank's number is NaN."""
    return [nan if any(map(isnan, values)) else max(values) for values in zip(*gather(numbers), strict=True)]


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks."""
    if several():
        tensor = tensor.clone()
        torch.distributed.all_reduce(tensor)
    return tensor


def averaged(tensor: Tensor) -> Tensor:
    """Average a tensor over all ranks, with the same bits on each."""
    return stacked(tensor.contiguous()).mean(0)


def shared(tensor: Tensor) -> Tensor:
    """Broadcast rank 0's tensor; the result is on the tensor's device."""
    if not several():
        return tensor
    on_gpu = torch.distributed.get_backend() == "nccl"
    sent = tensor.detach().to(torch.cuda.current_device() if on_gpu else tensor.device, copy=True).contiguous()
    torch.distributed.broadcast(sent, 0)
    return sent.to(tensor.device)


def broadcast_buffers(module: nn.Module) -> None:
    """Broadcast rank 0's buffers, as DistributedDataParallel does before every forward pass in training.

    Without SyncBatchNorm each rank's running statistics follow its own images until then. With this, ranks compare,
    validate and save the buffers with which training continues.
    """
    if several():
        for buffer in module.buffers():
            torch.distributed.broadcast(buffer, 0)


def network_state(network: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of all state that must be identical on every rank."""
    yield from network.named_parameters()
    yield from network.named_buffers()
    names = {parameter: name for name, parameter in network.named_parameters()}
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                # Sorted, since ranks may have filled the dictionary in different orders.
                for key, value in sorted(getattr(optimizer, "state", {}).get(parameter, {}).items()):
                    name = f"{key} of {names.get(parameter, 'a parameter that is not in use')}"
                    plain = (Tensor, bool, int, float, str)
                    yield from ((name, leaf) for leaf in tree_leaves(value) if isinstance(leaf, plain))


def compare(content: Iterable[tuple[str, Any]], when: str, advice: str = "") -> None:
    """Raise if ranks have different values. They exchange one hash, and one checksum per tensor only if it differs.

    Args:
        content: names of tensors or plain values that must be equal, and the values.
        when: time in the run, for the message.
        advice: end of the message's last sentence.

    Raises:
        UserError: values differ; the message names the tensors.
    """
    names, sums = checksums(content)
    # Not hash(): hashes of strings differ between processes.
    ours = hashlib.sha256(repr((names, sums.tolist())).encode()).hexdigest()
    if len(set(gather(ours))) > 1:
        raise UserError(
            f"ranks hold different values {when}: "
            f"{differing(gather(dict(zip(names, sums.tolist(), strict=True))))}. They must compute the same: "
            f"look for random draws, files or decisions that differ between ranks{advice}."
        )


def checksums(content: Iterable[tuple[str, Any]]) -> tuple[list[str], Tensor]:
    """Compute a checksum of the bits and the shape of each tensor (or plain value): names, and int64 on the CPU.

    A shard that only one process has cannot be compared: the checksum is that of its shape and dtype.
    """
    names, sums = [], []
    for name, value in content:
        names.append(name)
        if isinstance(value, Tensor) and not nobody_else_has(value):
            sums.append(_checksum(whole(value.detach())))
        else:
            plain = (value.shape, value.dtype) if isinstance(value, Tensor) else value
            text = torch.frombuffer(bytearray(repr(plain), "utf-8"), dtype=torch.uint8)
            sums.append(_checksum(text))
    # One transfer per device.
    on_cpu = torch.empty(len(sums), dtype=torch.int64)
    for device in {total.device for total in sums}:
        indices = [index for index, total in enumerate(sums) if total.device == device]
        on_cpu[indices] = torch.stack([sums[index] for index in indices]).cpu()
    return names, on_cpu


def _checksum(tensor: Tensor) -> Tensor:
    """Sum the words of a tensor with an odd weight for each, modulo 2^64: a scalar int64.

    This always detects a change of a single word, and two swapped neighbours.
    """
    words = tensor.contiguous().reshape(-1).view(torch.uint8)
    size = next(size for size in (8, 4, 2, 1) if words.numel() % size == 0)
    words = words.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    # Odd multiples of the golden ratio in 64 bits (Knuth's multiplicative hash).
    weights = 2 * torch.arange(min(len(words), _BLOCK), device=words.device) + 1
    weights = weights * -7046029254386353131
    for number, block in enumerate(words.split(_BLOCK)):
        total += (2 * number + 1) * (block * weights[: len(block)]).sum()
    return total * 31 + hash(tuple(tensor.shape))


def differing(everyone: list[dict[str, int]]) -> str:
    """Names of the tensors whose checksums differ between ranks."""
    first = everyone[0]
    names = [name for name in first if any(other.get(name) != first[name] for other in everyone[1:])]
    names += [f"{name} (not on rank 0)" for name in sorted(set().union(*everyone) - set(first))]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
