"""Train MNIST with Lightning, which starts the ranks itself: python with_lightning.py"""

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from ddp_helpers.data import BatchedDataset, load_mnist, prepare_mnist
from ddp_helpers.models import MLP


class LitMLP(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = MLP()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.nll_loss(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    train = load_mnist(prepare_mnist(), train=True)
    loader = DataLoader(train, batch_size=128, collate_fn=BatchedDataset.collate, drop_last=True)
    torch.manual_seed(0)
    module = LitMLP()
    gpus = torch.cuda.device_count() >= 2
    trainer = lightning.Trainer(
        accelerator="gpu" if gpus else "cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        torch.save(module.model.state_dict(), "mnist.pt")
