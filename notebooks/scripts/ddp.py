"""Train MNIST on several ranks: torchrun --standalone --nproc-per-node 2 ddp.py"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_helpers.data import BatchedDataset, load_mnist, prepare_mnist
from ddp_helpers.models import MLP

gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one for each rank
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
dist.init_process_group("nccl" if gpus else "gloo")

root = prepare_mnist()
train, test = load_mnist(root, train=True), load_mnist(root, train=False)
sampler = DistributedSampler(train, seed=0)
batch = 256 // dist.get_world_size()
loader = DataLoader(train, batch_size=batch, sampler=sampler, collate_fn=BatchedDataset.collate)

torch.manual_seed(0)
model = DistributedDataParallel(MLP().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(1, 4):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()


def accuracy(model: torch.nn.Module) -> float:
    correct = 0
    with torch.no_grad():
        for images, labels in DataLoader(test, batch_size=1000, collate_fn=BatchedDataset.collate):
            correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
    return correct / len(test)


if dist.get_rank() == 0:
    print(f"accuracy: {accuracy(model.module):.4f}")
    torch.save(model.module.state_dict(), "mnist.pt")
dist.destroy_process_group()
