"""Train MNIST on one device: python one_device.py"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

from ddp_helpers.data import BatchedDataset, load_mnist, prepare_mnist
from ddp_helpers.models import MLP

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

root = prepare_mnist()
train, test = load_mnist(root, train=True), load_mnist(root, train=False)
order = torch.Generator()
sampler = RandomSampler(train, generator=order)
batch = 256
loader = DataLoader(train, batch_size=batch, sampler=sampler, collate_fn=BatchedDataset.collate)

torch.manual_seed(0)
model = MLP().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(1, 4):
    order.manual_seed(epoch)
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


print(f"accuracy: {accuracy(model):.4f}")
torch.save(model.state_dict(), "mnist.pt")
