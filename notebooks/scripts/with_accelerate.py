"""Train MNIST with Accelerate: torchrun --standalone --nproc-per-node 2 with_accelerate.py"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

from ddp_helpers.data import BatchedDataset, load_mnist, prepare_mnist
from ddp_helpers.models import MLP

accelerator = Accelerator(cpu=not torch.cuda.is_available())
train = load_mnist(prepare_mnist(), train=True)
loader = DataLoader(train, batch_size=128, collate_fn=BatchedDataset.collate, drop_last=True)

torch.manual_seed(0)
model = MLP()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for images, labels in loader:
    optimizer.zero_grad()
    loss = F.nll_loss(model(images), labels)
    accelerator.backward(loss)
    optimizer.step()

if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "mnist.pt")
accelerator.end_training()
