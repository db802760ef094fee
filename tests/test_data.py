"""MNIST: the embedded subset, the full set, what happens to bad files and bad networks, and the batches."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import multiprocessing
import os
import pickle
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, default_collate
from torchvision import transforms
from torchvision.datasets import MNIST

from ddp_helpers import data
from ddp_helpers.data import BatchedDataset, load_mnist, normalize, prepare_mnist, read_folder, shard

NAMES = list(data.FILES["full"])
PROJECT = Path(__file__).parents[1]
DEAD = "http://127.0.0.1:1/"  # nothing listens there
GIVEN = os.environ.get("DDP_MNIST_ROOT")  # read before the fixture below hides it


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give each test an empty cache, no settings and no network."""
    for name in ("DDP_MNIST", "DDP_MNIST_ROOT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DDP_HELPERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(MNIST, "mirrors", [DEAD])
    return tmp_path / "cache"


@pytest.fixture
def official() -> Path:
    """Return the folder with the real official files, where this machine has them."""
    if not GIVEN:
        pytest.skip("DDP_MNIST_ROOT is not set: the official MNIST files are not at hand")
    return next(place for end in ("MNIST/raw", "raw", "") if any((place := Path(GIVEN) / end).glob("*-ubyte*")))


def idx(n: int, *shape: int, first: int = 0) -> bytes:
    """Make an IDX file of n items whose bytes count up from `first`."""
    header = struct.pack(f">BBBB{1 + len(shape)}I", 0, 0, 8, 1 + len(shape), n, *shape)
    return header + bytes((first + i) % 256 for i in range(n * int(torch.tensor(shape).prod())))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Let four small files pass for the full set: 60 and 10 images."""
    contents = {name: idx(60 if "train" in name else 10, *((28, 28) if "images" in name else ())) for name in NAMES}
    monkeypatch.setitem(data.FILES, "full", {name: hashlib.md5(c).hexdigest() for name, c in contents.items()})
    packed = {name: hashlib.md5(gzip.compress(c, mtime=0)).hexdigest() for name, c in contents.items()}
    monkeypatch.setattr(MNIST, "resources", [(f"{name}.gz", md5) for name, md5 in packed.items()])
    return contents


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of everything below a folder."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@contextlib.contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# The embedded subset


def cutter():
    spec = importlib.util.spec_from_file_location("cut_mnist", PROJECT / "tools" / "cut_mnist.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_subset_is_small_and_reads_through_torchvision():
    assert sum(path.stat().st_size for path in data.EMBEDDED.iterdir()) < 3_000_000
    with no_warning():
        root = prepare_mnist()
    for train, count in ((True, 12_000), (False, 1_999)):
        mnist = MNIST(root, train=train, download=False)
        assert mnist.data.shape == (count, 28, 28) and mnist.data.dtype == torch.uint8
        assert mnist.targets.shape == (count,)
        assert min(Counter(mnist.targets.tolist()).values()) > count // 13  # ten classes, each well filled
        assert len(Counter(mnist.targets.tolist())) == 10


def test_subset_is_every_fifth_official_image(official: Path):
    contents = read_folder(official, data.FILES["full"])
    subset = read_folder(data.EMBEDDED, data.FILES["subset"])
    for name, content in contents.items():
        start, size = (16, 784) if "images" in name else (8, 1)
        count = 12_000 if "train" in name else 1_999
        items = torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(-1, size)
        kept = torch.frombuffer(bytearray(subset[name][start:]), dtype=torch.uint8).view(-1, size)
        assert torch.equal(kept, items[::5][:count])
    assert cutter().cut_subset(official) == subset


def test_cutting_is_deterministic_and_checks_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = cutter().pack(b"abc" * 1000)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert cutter().pack(b"abc" * 1000) == first
    for path in data.EMBEDDED.glob("*.gz"):
        assert path.read_bytes()[3:8] == bytes(5), f"{path} carries a name or a time"
    for name in NAMES:
        (tmp_path / name).write_bytes(idx(10_000))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte is not the expected file"):
        cutter().cut_subset(tmp_path)


def test_subset_needs_no_network_and_works_in_a_rank(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise AssertionError("the embedded subset opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("RANK", "1")
    assert len(load_mnist(prepare_mnist(), train=False)) == 1_999


def test_prepared_root_is_only_read(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    root = prepare_mnist()
    for path in (own_cache, *own_cache.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = snapshot(own_cache)
    refused: Callable = lambda *args, **kwargs: (_ for _ in ()).throw(PermissionError(13, "read-only"))  # noqa: E731
    monkeypatch.setattr(Path, "mkdir", refused)
    assert prepare_mnist() == root
    assert len(load_mnist(root, train=True)) == 12_000
    assert len(MNIST(root, train=False)) == 1_999
    assert snapshot(own_cache) == before
    for path in (own_cache, *own_cache.rglob("*")):
        path.chmod(0o755)


def test_unwritable_cache_falls_back_to_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("DDP_HELPERS_CACHE", str(tmp_path / "file" / "cache"))
    root = prepare_mnist()
    assert root.is_relative_to(tmp_path / "temporary") and len(load_mnist(root, train=False)) == 1_999
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="set DDP_HELPERS_CACHE to a folder"):
        prepare_mnist()


def test_home_holds_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DDP_HELPERS_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home with a space"))
    assert prepare_mnist() == tmp_path / "home with a space" / ".cache" / "ddp_helpers" / "mnist-subset"


def test_setting_chooses_the_set(small: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(tmp_path / "given", small)
    monkeypatch.setenv("DDP_MNIST_ROOT", str(tmp_path / "given"))
    for choice, count in (("", 12_000), ("subset", 12_000), ("full", 60)):
        monkeypatch.setenv("DDP_MNIST", choice)
        assert len(load_mnist(prepare_mnist(), train=True)) == count
    assert len(load_mnist(prepare_mnist(full=False), train=True)) == 12_000
    monkeypatch.setenv("DDP_MNIST", "ful")
    with pytest.raises(ValueError, match="DDP_MNIST is 'ful': set it to 'subset' or 'full'"):
        prepare_mnist()
    assert len(load_mnist(prepare_mnist(full=True), train=True)) == 60


# Bad files


def truncate(raw: Path) -> str:
    path = raw / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1000])
    return f"train-images-idx3-ubyte is damaged: its {path.stat().st_size:,} bytes don't fit its header"


def empty(raw: Path) -> str:
    (raw / "t10k-labels-idx1-ubyte").write_bytes(b"")
    return "t10k-labels-idx1-ubyte is damaged: its 0 bytes"


def remove(raw: Path) -> str:
    (raw / "t10k-images-idx3-ubyte").unlink()
    return r"t10k-images-idx3-ubyte can't be read \(No such file"


def replace_by_text(raw: Path) -> str:
    (raw / "train-labels-idx1-ubyte").write_text("<html>Forbidden</html>")
    return "train-labels-idx1-ubyte is damaged: its 22 bytes"


def alter(raw: Path) -> str:
    path = raw / "t10k-images-idx3-ubyte"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return "t10k-images-idx3-ubyte is not the expected file: 1,999 items, md5 other than a99acea"


def mismatch(raw: Path) -> str:
    (raw / "train-images-idx3-ubyte").write_bytes(idx(10, 28, 28))
    (raw / "train-labels-idx1-ubyte").write_bytes(idx(7))
    return "train-images-idx3-ubyte is not .* 10 items.*train-labels-idx1-ubyte is not .* 7 items"


@pytest.mark.parametrize("damage", [truncate, empty, remove, replace_by_text, alter, mismatch])
def test_damaged_file_is_named_and_made_again(damage: Callable[[Path], str]):
    root = prepare_mnist()
    message = damage(root / "MNIST" / "raw")
    with pytest.warns(UserWarning, match=message) as caught:
        assert prepare_mnist() == root
    assert len(caught) == 1 and caught[0].filename == __file__
    with no_warning():
        prepare_mnist()
    assert (len(load_mnist(root, train=True)), len(load_mnist(root, train=False))) == (12_000, 1_999)


@pytest.mark.parametrize("damage", [truncate, empty, remove, replace_by_text])
def test_loading_names_a_damaged_file(damage: Callable[[Path], str]):
    root = prepare_mnist()
    with pytest.raises(RuntimeError, match=damage(root / "MNIST" / "raw") + r".*Call prepare_mnist\(\)"):
        load_mnist(root, train=True)


def test_loading_counts_images_and_labels(tmp_path: Path):
    root = prepare_mnist()
    mismatch(root / "MNIST" / "raw")
    with pytest.raises(RuntimeError, match=r"10 images but 7 labels.*Call prepare_mnist\(\)"):
        load_mnist(root, train=True)
    with pytest.raises(RuntimeError, match=r"train-images-idx3-ubyte can't be read \(No such file"):
        load_mnist(tmp_path / "nowhere", train=True)


def test_damaged_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data, "EMBEDDED", tmp_path)
    with pytest.raises(RuntimeError, match=r"train-images-idx3-ubyte can't be read.*Copy the folder mnist/"):
        prepare_mnist()
    shutil.copytree(Path(data.__file__).parent / "mnist", tmp_path, dirs_exist_ok=True)
    packed = tmp_path / "train-images-idx3-ubyte.gz"
    packed.write_bytes(packed.read_bytes()[:100_000])
    with pytest.raises(RuntimeError, match=r"train-images-idx3-ubyte\.gz can't be read \(Compressed file ended"):
        prepare_mnist()


# The full set from a folder


def fill(folder: Path, contents: dict[str, bytes], packed: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path, content = (f"{name}.gz", gzip.compress(content, mtime=0)) if packed else (name, content)
        (folder / path).write_bytes(content)


@pytest.mark.parametrize("packed", [True, False], ids=["gz", "raw"])
@pytest.mark.parametrize("place", ["", "raw", "MNIST/raw"])
def test_full_set_from_a_folder(place, packed, small, own_cache, tmp_path, monkeypatch):
    given = tmp_path / "given"
    fill(given / place, small, packed)
    for path in (given, *given.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = snapshot(given)
    monkeypatch.setenv("DDP_MNIST_ROOT", str(given))
    monkeypatch.setenv("RANK", "0")  # reading a folder is allowed in a rank
    with no_warning():
        root = prepare_mnist(full=True)
    assert (len(load_mnist(root, train=True)), len(MNIST(root, train=False))) == (60, 10)
    assert snapshot(given) == before
    monkeypatch.delenv("DDP_MNIST_ROOT")
    assert prepare_mnist(full=True) == root == own_cache / "mnist-full"


def test_bad_folder_is_named(small, tmp_path, monkeypatch):
    fill(tmp_path / "given", small)
    (tmp_path / "given" / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(7)))
    monkeypatch.setenv("DDP_MNIST_ROOT", str(tmp_path / "given"))
    fault = r"DDP_MNIST_ROOT does not hold MNIST: .*given/t10k-labels-idx1-ubyte\.gz is not .* 7 items"
    with pytest.warns(UserWarning, match=fault) as caught, pytest.raises(RuntimeError, match="can't be downloaded"):
        prepare_mnist(full=True)
    assert caught[0].filename == __file__
    monkeypatch.setenv("DDP_MNIST_ROOT", str(tmp_path / "nowhere"))
    with pytest.warns(UserWarning, match=r"nowhere/.*can't be read"), pytest.raises(RuntimeError):
        prepare_mnist(full=True)


def test_official_files(official: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DDP_MNIST_ROOT", str(official))
    root = prepare_mnist(full=True)
    assert (len(load_mnist(root, train=True)), len(load_mnist(root, train=False))) == (60_000, 10_000)


# The full set from the network


class Mirror(ThreadingHTTPServer):
    """Serve packed files on 127.0.0.1; `plan[path]` says how to treat the next requests for a path."""

    daemon_threads = True

    def __init__(self, contents: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), MirrorHandler)
        self.files = {f"/{name}.gz": gzip.compress(content, mtime=0) for name, content in contents.items()}
        self.plan: dict[str, list[str]] = defaultdict(list)
        self.always, self.served, self.asked = "", Counter(), 0
        self.stalled, self.again, self.left = False, threading.Event(), False
        self.url = f"http://127.0.0.1:{self.server_port}/"


class MirrorHandler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        self.server.asked += 1
        if self.server.stalled and not self.server.again.is_set():
            self.server.left = True
            self.server.again.set()
        body = self.server.files[self.path]
        probe = self.headers.get("Method") == "HEAD"  # torchvision follows redirects first and reads no body
        plan = self.server.plan[self.path]
        how = "" if probe else self.server.always or (plan.pop(0) if plan else "")
        if how == "403":
            return self.send_error(403)
        if how == "page":
            body = b"<html>please log in</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return self.connection.close()
        if probe:
            return None
        if how == "stall":
            self.server.stalled = True
            self.server.again.wait(5)
            self.server.again.set()  # too late now
            return None
        self.server.served[self.path] += how in ("", "slow")  # whole files only; before the client can go on
        if how == "cut":
            body = body[: len(body) // 2]
        if how == "slow":
            for i in range(0, len(body), 1 + len(body) // 10):
                self.wfile.write(body[i : i + 1 + len(body) // 10])
                self.wfile.flush()
                time.sleep(0.03)
        else:
            self.wfile.write(body)
        self.close_connection = True
        return None

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def mirror(contents: dict[str, bytes]) -> Iterator[Mirror]:
    server = Mirror(contents)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def leftovers(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {"mnist-full", "mnist-full.lock"}


@pytest.mark.parametrize("how", ["", "403", "cut", "reset", "page"])
def test_download_survives_a_bad_mirror(how, small, own_cache, monkeypatch, capfd):
    with mirror(small) as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        server.plan["/train-labels-idx1-ubyte.gz"] = [how] if how else []
        root = prepare_mnist(full=True)
        assert server.served == {path: 1 for path in server.files}
        assert read_folder(root / "MNIST" / "raw", data.FILES["full"]) == small
        assert re.search(r"100(\.0)?%", capfd.readouterr().err)  # torchvision's progress bar
        asked = server.asked
        assert prepare_mnist(full=True) == root and server.asked == asked
    assert leftovers(own_cache) == set() and socket.getdefaulttimeout() is None


@pytest.mark.parametrize("how", ["403", "cut", "reset", "page"])
def test_download_goes_on_to_the_next_mirror(how, small, monkeypatch):
    with mirror(small) as bad, mirror(small) as good:
        bad.always = how
        monkeypatch.setattr(MNIST, "mirrors", [bad.url, good.url])
        prepare_mnist(full=True)
        assert bad.asked and good.served == {path: 1 for path in good.files}


def test_download_leaves_a_silent_mirror(small, monkeypatch):
    real = socket.setdefaulttimeout
    monkeypatch.setattr(socket, "setdefaulttimeout", lambda seconds: real(seconds and seconds / 100))
    with mirror(small) as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        server.plan["/t10k-images-idx3-ubyte.gz"] = ["stall"]
        root = prepare_mnist(full=True)
        assert server.left  # another request came while this one was silent
        assert read_folder(root / "MNIST" / "raw", data.FILES["full"]) == small
    assert socket.getdefaulttimeout() is None


def test_download_checks_what_the_mirror_sends(small, own_cache, monkeypatch):
    wrong = {**small, "t10k-labels-idx1-ubyte": idx(10, first=1)}  # well formed, with a matching checksum of its .gz
    md5s = {name: hashlib.md5(gzip.compress(content, mtime=0)).hexdigest() for name, content in wrong.items()}
    monkeypatch.setattr(MNIST, "resources", [(f"{name}.gz", md5) for name, md5 in md5s.items()])
    with mirror(wrong) as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        with pytest.raises(RuntimeError, match=r"t10k-labels-idx1-ubyte\.gz is not the expected file: 10 items"):
            prepare_mnist(full=True)
    assert leftovers(own_cache) == set() and not any((own_cache / "mnist-full" / "MNIST" / "raw").iterdir())


@pytest.mark.parametrize("damage", [truncate, empty, remove, mismatch])
def test_damaged_full_file_is_fetched_again(damage, small, monkeypatch):
    with mirror(small) as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        root = prepare_mnist(full=True)
        message = damage(root / "MNIST" / "raw")
        with pytest.warns(UserWarning, match=message):
            prepare_mnist(full=True)
        assert read_folder(root / "MNIST" / "raw", data.FILES["full"]) == small
        assert set(server.served.values()) == {2}


def test_offline_message_says_what_to_do(small, own_cache):
    with pytest.raises(RuntimeError) as caught:
        prepare_mnist(full=True)
    for part in ("can't be downloaded", "Connection refused", "embedded subset needs no network", "DDP_MNIST_ROOT"):
        assert part in str(caught.value)
    assert leftovers(own_cache) == set()


def in_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")


def in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)


@pytest.mark.parametrize("where", [in_a_rank, in_a_group])
def test_rank_does_not_download(where, small, monkeypatch):
    with mirror(small) as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        with monkeypatch.context() as patch:
            where(patch)
            with pytest.raises(RuntimeError, match=r"a rank does not download it: call prepare_mnist\(full=True\)"):
                prepare_mnist(full=True)
            assert server.asked == 0
        root = prepare_mnist(full=True)
        where(monkeypatch)
        assert prepare_mnist(full=True) == root  # there now


# Several processes


def start(work: Callable[[], None], count: int) -> list:
    """Run `work` in forked processes, which inherit this test's patches, and return them ended."""
    processes = [multiprocessing.get_context("fork").Process(target=work) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    return processes


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")


@needs_fork
def test_four_processes_download_once(small, own_cache, monkeypatch):
    def work() -> None:
        with no_warning():
            root = prepare_mnist(full=True)
        assert read_folder(root / "MNIST" / "raw", data.FILES["full"]) == small

    with mirror(small) as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        server.plan["/train-images-idx3-ubyte.gz"] = ["403"]
        server.plan["/train-labels-idx1-ubyte.gz"] = ["cut"]
        for path in server.files:
            server.plan[path] += ["slow"] * 4
        assert [process.exitcode for process in start(work, 4)] == [0, 0, 0, 0]
        assert server.served == {path: 1 for path in server.files}
    assert leftovers(own_cache) == set()


@needs_fork
def test_process_killed_while_it_unpacks_leaves_no_partial_file(own_cache, monkeypatch):
    replace, calls = os.replace, []

    def die(source: Path, target: Path) -> None:
        assert source.stat().st_size and not source.is_relative_to(target.parent)
        if calls:
            os._exit(9)
        calls.append(replace(source, target))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        assert start(lambda: prepare_mnist() and None, 1)[0].exitcode == 9
    raw = own_cache / "mnist-subset" / "MNIST" / "raw"
    assert [path.name for path in raw.iterdir()] == NAMES[:1]
    with pytest.warns(UserWarning, match="train-labels-idx1-ubyte can't be read"):  # the lock went with the process
        assert len(load_mnist(prepare_mnist(), train=True)) == 12_000


# Batches


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> BatchedDataset:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_HELPERS_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load_mnist(prepare_mnist(full=False), train=False)


def test_batch_equals_the_samples_collated(digits):
    indices = [1998, 0, 7, 7, 513]
    images, labels = digits.__getitems__(indices)
    assert (images.shape, images.dtype) == ((5, 1, 28, 28), torch.float32)
    assert (labels.shape, labels.dtype) == ((5,), torch.int64)
    expected = default_collate([digits[i] for i in indices])
    assert torch.equal(images, expected[0]) and torch.equal(labels, expected[1])
    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    classic = torch.stack([steps(digits.images[i].numpy()) for i in indices])
    assert torch.equal(images, classic)  # what the classic tutorial computes, bit for bit
    assert [len(part) for part in digits.__getitems__([])] == [0, 0]


def test_whole_epoch_equals_the_default_loader(digits):
    batched = DataLoader(digits, batch_size=128, collate_fn=BatchedDataset.collate)
    pairs = [digits[i] for i in range(len(digits))]
    count = 0
    for (images, labels), (x, y) in zip(batched, DataLoader(pairs, batch_size=128), strict=True):
        assert torch.equal(images, x) and torch.equal(labels, y)
        count += len(labels)
    assert count == 1_999


def test_samples_index_like_a_list(digits):
    assert torch.equal(digits[-1][0], digits[1_998][0])
    for index in (1_999, -2_000):
        with pytest.raises(IndexError):
            digits[index]


def test_any_tensors_and_any_transform():
    features, targets = torch.randn(7, 3), torch.randn(7, 2)
    plain = BatchedDataset(features, targets, transform=None)
    assert torch.equal(plain.__getitems__([6, 1])[0], features[[6, 1]])
    assert torch.equal(BatchedDataset(features, targets, torch.neg)[2][0], -features[2])
    with pytest.raises(ValueError, match="7 images but 6 labels"):
        BatchedDataset(features, targets[:6])


def test_normalize_leaves_the_images_alone():
    images = torch.full((2, 28, 28), 255, dtype=torch.uint8)
    assert torch.allclose(normalize(images), torch.full((2, 1, 28, 28), (1 - 0.1307) / 0.3081))
    assert torch.equal(images, torch.full_like(images, 255))
    floats = images.float()
    assert torch.equal(normalize(floats), normalize(images)) and torch.equal(floats, images.float())


@needs_fork
def test_pickles_and_feeds_workers(digits):
    payload = pickle.dumps(digits)
    assert len(payload) < digits.images.nbytes + digits.labels.nbytes + 2_000
    assert torch.equal(pickle.loads(payload)[5][0], digits[5][0])
    loader = DataLoader(
        digits, batch_size=500, num_workers=2, multiprocessing_context="fork", collate_fn=BatchedDataset.collate
    )
    assert torch.equal(torch.cat([labels for _, labels in loader]), digits.labels)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_cover_the_data_in_each_epoch(digits, world_size):
    tagged = BatchedDataset(digits.images, torch.arange(len(digits)))
    orders = []
    for epoch in (0, 1):
        seen: list[int] = []
        for rank in range(world_size):
            sampler = DistributedSampler(tagged, num_replicas=world_size, rank=rank, seed=0)
            sampler.set_epoch(epoch)
            loader = DataLoader(tagged, batch_size=128, sampler=sampler, collate_fn=BatchedDataset.collate)
            seen += [index for _, indices in loader for index in indices.tolist()]
        assert set(seen) == set(range(1_999))
        assert len(seen) == -(-1_999 // world_size) * world_size  # padded: two samples twice on three ranks
        orders.append(seen)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("n", [0, 1, 2, 10, 1_999])
@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_shards_hold_each_index_once(n, world_size):
    shards = [shard(n, rank, world_size) for rank in range(world_size)]
    assert sorted(index for part in shards for index in part) == list(range(n))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize(("n", "rank", "world_size"), [(10, 4, 4), (10, -1, 4), (-1, 0, 1), (10, 0, 0)])
def test_impossible_shard(n, rank, world_size):
    with pytest.raises(ValueError, match=f"No shard of {n} samples for rank {rank} of {world_size}"):
        shard(n, rank, world_size)


def test_copied_file_works_alone_and_imports_no_torchvision(tmp_path):
    package = Path(data.__file__).parent
    shutil.copy(package / "data.py", tmp_path)
    shutil.copytree(package / "mnist", tmp_path / "mnist")
    code = (
        "import sys, data\n"
        "root = data.prepare_mnist()\n"
        "assert 'torchvision' not in sys.modules, 'torchvision was imported'\n"
        "assert not any(name.startswith('ddp_helpers') for name in sys.modules)\n"
        "print(len(data.load_mnist(root, train=False)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1999\n", "")
