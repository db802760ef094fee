"""Train MNIST on any number of ranks: the program to take home (needs torch and torchvision; copy the package with it).

    python -m ddp_helpers.train_mnist                               one process
    python -m ddp_helpers.train_mnist --nprocs 2                    two ranks, started here
    torchrun --nproc-per-node 2 -m ddp_helpers.train_mnist          two ranks, started by torchrun
    … --checkpoint run.pt --resume                                  saved after each epoch; killed, it can go on

`main(rank, config)` is the program of each rank: `launch(main, (Config(epochs=1),), nprocs=2)` runs it in a notebook.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from . import devices, process_group
from .checkpoint import Position, load_checkpoint, save_checkpoint
from .data import BatchedDataset, load_mnist, prepare_mnist
from .evaluation import evaluate
from .models import CNN, MLP
from .training import train_epoch, wrap


def _option(default: Any, text: str, *choices: str) -> Any:
    how = {"default_factory": default} if callable(default) else {"default": default}
    return field(**how, metadata={"help": text, "choices": choices or None})


@dataclass(frozen=True)
class Config:
    """What a run is made of; each field is an option of the command line. Raises ValueError for a wrong choice."""

    data: str = _option(lambda: os.environ.get("DDP_MNIST") or "subset", "12,000 or 60,000 images", "subset", "full")
    model: str = _option("mlp", "784-512-10, or two convolutions", "mlp", "cnn")
    epochs: int = _option(10, "passes over the training data")
    global_batch: int = _option(256, "samples per step over all ranks; each rank takes an equal part")
    lr: float = _option(1e-3, "learning rate of Adam")
    seed: int = _option(0, "seed of the initial weights and of the order of the samples")
    log_every: int = _option(20, "steps between two log lines; 0 prints the fingerprint alone")
    checkpoint: str = _option("", "file to save the run to after each epoch, on rank 0's disk")
    resume: bool = _option(False, "go on from the checkpoint, or start if there is none yet")

    def __post_init__(self) -> None:
        if self.resume and not self.checkpoint:
            raise ValueError("resume needs a checkpoint to go on from: say which file")
        for f in fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            if choices and value not in choices:
                where = " (from DDP_MNIST, perhaps)" if f.name == "data" else ""
                raise ValueError(f"{f.name} is {value!r}{where}: choose {' or '.join(map(repr, choices))}")

    def batch_size(self, world_size: int) -> int:
        """Return the batch per rank. Raises ValueError unless the ranks can share the global batch equally."""
        if self.global_batch < 1 or self.global_batch % world_size:
            raise ValueError(
                f"a global batch of {self.global_batch} can't be split into {world_size} equal parts, and unequal ones "
                f"would change the gradient: choose a multiple of the world size, {world_size}"
            )
        return self.global_batch // world_size


def main(rank: int, config: Config) -> dict[str, Any]:
    """Train and evaluate as rank `rank`; every rank must call it. Without RANK in the environment it is the only one.

    Returns, the same on each rank: world_size, losses (mean per epoch), accuracy, correct, count, fingerprint (of the
    weights) and weights (a state_dict on the CPU). Raises ValueError if the global batch can't be shared equally or
    the checkpoint is of a run with other settings, CheckpointError if it can't be written or read.
    """
    batch_size = config.batch_size(int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1)

    # 1. Prepare: the data, once per node. The other ranks wait in step 2, where all meet.
    full = config.data == "full"
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        prepare_mnist(full)

    # 2. Initialise: the process group. The device comes from the local rank.
    backend, device = devices.pick()
    process_group.setup(backend)
    world_size = process_group.world_size()

    # 3. Model: one seed gives the same initial weights on every rank.
    torch.manual_seed(config.seed)
    model = {"mlp": MLP, "cnn": CNN}[config.model]()

    # 4. Wrap: from here on backward() averages gradients over the ranks.
    ddp = wrap(model, device)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=config.lr)

    # 5. Data: each rank its own shard, in batches of global batch / world size.
    root = prepare_mnist(full)  # it is there: this only checks the files
    train, test = load_mnist(root, train=True), load_mnist(root, train=False)
    sampler: DistributedSampler[Any] = DistributedSampler(
        train, num_replicas=world_size, rank=rank, shuffle=True, seed=config.seed
    )
    loader = DataLoader(train, batch_size=batch_size, sampler=sampler, collate_fn=BatchedDataset.collate)

    # 6. Loop: a new order each epoch, the same one on every rank. What a resumed run must have in common is saved, too.
    settings = {name: getattr(config, name) for name in ("data", "model", "global_batch", "lr", "seed")}
    position = Position(epoch=1, extra={"losses": [], "settings": settings})
    if config.resume:
        position = load_checkpoint(config.checkpoint, missing=position, model=ddp, optimizer=optimizer)
        if (before := position.extra["settings"]) != settings:
            raise ValueError(f"{config.checkpoint} is of another run: {before}, and this one has {settings}")
        if rank == 0 and config.log_every:
            print(f"{config.checkpoint}: epoch {position.epoch} comes next")
    losses = position.extra["losses"]
    while position.epoch <= config.epochs:
        sampler.set_epoch(position.epoch)
        losses.append(train_epoch(ddp, loader, optimizer, position.epoch, device, config.log_every))
        position.epoch += 1
        if config.checkpoint:
            save_checkpoint(config.checkpoint, position, model=ddp, optimizer=optimizer)
    score = evaluate(ddp, test, batch_size=1000, device=device)
    if rank == 0 and config.log_every:
        print(f"Test accuracy: {score.correct}/{score.count} ({score.accuracy:.2%}), loss {score.loss:.4f}")

    # 7. Clean up: the wrapper must be gone before the group is.
    weights = {name: value.detach().cpu() for name, value in process_group.unwrap(ddp).state_dict().items()}
    del ddp, optimizer
    process_group.teardown()
    return {
        "world_size": world_size,
        "losses": losses,
        "accuracy": score.accuracy,
        "correct": score.correct,
        "count": score.count,
        "fingerprint": process_group.checksum(weights.values())[:16],
        "weights": weights,
    }


def cli(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run `main` here or on `--nprocs` ranks, and print the fingerprint last."""
    started = "RANK" in os.environ  # by torchrun or the like
    rank = int(os.environ["RANK"]) if started else 0
    parser = argparse.ArgumentParser(
        prog="python -m ddp_helpers.train_mnist",
        description="Train MNIST with DistributedDataParallel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    try:
        defaults = Config()
        for f in fields(Config):
            default: Any = getattr(defaults, f.name)
            how = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
            parser.add_argument(f"--{f.name.replace('_', '-')}", **how, **{k: v for k, v in f.metadata.items() if v})
        parser.add_argument("--nprocs", type=int, default=1, help="ranks to start; under torchrun leave it out")
        options = vars(parser.parse_args(arguments))
        nprocs, config = options.pop("nprocs"), Config(**options)
        if nprocs < 1:
            raise ValueError(f"--nprocs is the number of ranks, 1 or more, not {nprocs}")
        config.batch_size(int(os.environ["WORLD_SIZE"]) if started else nprocs)
    except ValueError as error:
        parser.error(str(error))
    if started and nprocs != 1:
        parser.error("--nprocs starts ranks, but this process is one already (RANK is set): leave it out")
    if nprocs == 1:
        result = main(rank, config)
    else:
        from .launcher import launch

        prepare_mnist(config.data == "full")
        result = launch(main, (config,), nprocs=nprocs)[0]
    if rank == 0:
        print(f"fingerprint: {result['fingerprint']}")


if __name__ == "__main__":
    cli()
