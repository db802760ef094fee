"""The two models of the series (needs torch): the MLP of the classic tutorial and a small CNN."""

from torch import Tensor, nn


class MLP(nn.Sequential):
    """The classic 784-512-10 network; images [b, 1, 28, 28] float32 to log-probabilities [b, 10] float32."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10), nn.LogSoftmax(dim=1))


class CNN(nn.Module):
    """Two convolutions (16 and 32 channels) and one linear layer; [b, 1, 28, 28] to log-probabilities [b, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        return self.head(x.flatten(1)).log_softmax(1)
