"""A worker for torch.multiprocessing.spawn, in a file: spawn sends a name, not code."""

import time


def hello(rank, world_size):
    for line in range(3):
        print(f"rank {rank} of {world_size} prints line {line}", flush=True)
        time.sleep(0.2)
    return 10 * rank
