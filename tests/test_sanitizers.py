"""Each sanitizer changes what varies between runs and leaves every result alone."""

from __future__ import annotations

import re

import pytest
from nbval.plugin import get_sanitize_patterns
from run_notebook import SANITIZERS, read_rules, sanitize

# replacement: (lines with what the rule makes of them, lines that the rule must leave alone)
RULES: dict[str, tuple[dict[str, str], list[str]]] = {
    "RATE": (
        {
            "812.3 images/s": "RATE",
            "1,204 samples/s, 3 ranks": "RATE, 3 ranks",
            "trained at 40 steps/s.": "trained at RATE.",
            "[12.5it/s]": "[RATE]",
            "98 MB/s and 1.2e+03 GB/s": "RATE and RATE",
        },
        ["812 images", "images/s", "40 steps/second", "3 MB", "2560/6000", "12 it/sec", "v1.2 images/s"],
    ),
    "DURATION": (
        {
            "took 0.31 s": "took DURATION",
            "took 0.31s.": "took DURATION.",
            "after 5 s: rank 0 waits": "after DURATION: rank 0 waits",
            "3.2 ms, 40us, 7 µs, 7 μs, 12ns, 2 min": ", ".join(["DURATION"] * 6),
            "1,204 ms per step": "DURATION per step",
            "1.5e-03 s": "DURATION",
        },
        [
            "7s look like 9s",
            "rank 0's loss",
            "5 samples",
            "3 steps",
            "10 minutes",
            "2 seconds",
            "min 0.2",
            "x5 s",
        ],
    ),
    r"\1:PORT": (
        {
            "tcp://127.0.0.1:43211/": "tcp://127.0.0.1:PORT/",
            "closed by peer [127.0.0.1]:43211": "closed by peer [127.0.0.1]:PORT",
            "localhost:80": "localhost:PORT",
        },
        ["127.0.0.1", "0: 43211", "ratio 3:43211", "10.127.0.0.1.43211", "localhost: 2 ranks"],
    ),
    r"\1PORT": (
        {
            "on port 43211": "on port PORT",
            "Port: 29500": "Port: PORT",
            "port=1024,": "port=PORT,",
            "MASTER_PORT=43211": "MASTER_PORT=PORT",
        },
        ["port 0", "transport 43211", "export 12345", "12000", "ports 12345", "port 123456"],
    ),
    r"\1NUMBER": (
        {"pid 4321": "pid NUMBER", "PID: 17 ended": "PID: NUMBER ended", "(pid=7)": "(pid=NUMBER)"},
        ["rapid 3", "pids 4321", "process 1", "rank 4321", "pid of rank 0"],
    ),
    "/tmp/PATH": (
        {
            "saved /tmp/tmpab12/last.pt.": "saved /tmp/PATH.",
            "'/tmp/x'": "'/tmp/PATH'",
            "file:///tmp/store-3": "file:///tmp/PATH",
        },
        ["/tmp", "/tmp/", "data/tmp/x", "./tmp/x", "temp/x"],
    ),
    "at 0xADDRESS": (
        {"<object object at 0x7f3c5e0a4b20>": "<object object at 0xADDRESS>", "at 0x7F3C5E": "at 0xADDRESS"},
        ["0xff", "at 0x10", "magic 0x00000803", "at 0xADDRESS"],
    ),
    r"\1BACKEND": (
        {
            "backend: gloo": "backend: BACKEND",
            "backend=nccl, 2 ranks": "backend=BACKEND, 2 ranks",
            "backend: undefined": "backend: BACKEND",
            "Backend: cpu:gloo,cuda:nccl": "Backend: BACKEND",
            "init_process_group(backend='gloo')": "init_process_group(backend='BACKEND')",
        },
        ["gloo", "backend", "gloo uses the loopback interface", "backend: gloomy", "the backend gloo"],
    ),
    r"\1DEVICE": (
        {
            "device: cpu": "device: DEVICE",
            "[rank 1] device=cuda:1": "[rank 1] device=DEVICE",
            "device='cuda:0')": "device='DEVICE')",
            "Device: mps": "Device: DEVICE",
        },
        ["cpu", "2 cpus", "devices: 2", "on_device: cpu", "device: cpus", "one device", "cuda:0"],
    ),
    "device(DEVICE)": (
        {"device(type='cpu')": "device(DEVICE)", "(device(type='cuda', index=1),)": "(device(DEVICE),)"},
        ["device(0)", "device", "type='cpu'", "devices(type='cpu'"],
    ),
}

# What notebooks print and must always be compared: no rule may change any of it.
RESULTS = [
    "Loss: 0.31",
    "Train Epoch: 1 [2560/6000 (43%)]\tLoss: 0.306",
    "rank 0",
    "[rank 1] step 3, samples 12 to 15",
    "12000",
    "12,000 images in 94 batches",
    "1999",
    "0.94",
    "-1.5",
    "1e-05",
    "3:4",
    "torch.Size([64, 10])",
    "tensor([1., 2., 3.])",
    "local (2, 3), global (4, 3)",
    "True",
    "{0, 2, 4}",
    "2 ranks, 1 node, world size 2",
    "bucket 0: 25088 bytes, 1.6 MB",
    "per rank 64, global batch 128",
    "equal on all ranks: True",
    "[0, 1, 2] + [2, 3, 4]",
    "100 %",
    "epoch 10 of 10, accuracy 93.1 %",
]

TEXT = SANITIZERS.read_text(encoding="utf-8")
PATTERNS = dict(read_rules())
BY_REPLACEMENT = {replacement: regex for regex, replacement in PATTERNS.items()}


def rule_names(text: str) -> list[str]:
    """List the replacements that the file means to have, read line by line."""
    return [line.removeprefix("replace: ") for line in text.splitlines() if line.startswith("replace:")]


def file_problems(text: str) -> list[str]:
    """Describe what is wrong with the text of a sanitizer file."""
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if line != line.strip():
            found.append(f"line {number}: blanks at an end belong to the rule; remove them")
        if line.startswith("regex:"):
            below = lines[number] if number < len(lines) else ""
            if not re.fullmatch(r"replace: \S.*", below):
                found.append(f"line {number}: no 'replace: TEXT' directly below; nbval drops the rule")
            regex = line.removeprefix("regex: ")
            plain = re.sub(r"\[(?:\\.|[^\]\\])*\]", "C", re.sub(r"\\[.\[\]()]", "E", regex))
            if "." in plain or r"\S" in plain or "[^" in regex:
                found.append(f"line {number}: matches anything; name the characters that it may match")
        elif line.startswith("replace:"):
            if number == 1 or not lines[number - 2].startswith("regex: "):
                found.append(f"line {number}: no 'regex:' directly above")
        elif line and not line.startswith("#"):
            found.append(f"line {number}: neither a comment nor a rule")
    written = sum(line.startswith("regex:") for line in lines)
    parsed = len(dict(get_sanitize_patterns(text)))
    if parsed != written:
        found.append(f"nbval reads {parsed} of {written} rules")
    return found


def test_file_is_sound() -> None:
    assert file_problems(TEXT) == []


def test_nbval_reads_every_rule() -> None:
    assert list(BY_REPLACEMENT) == rule_names(TEXT) == list(RULES)
    assert len(PATTERNS) == len(RULES)


GOOD_RULE = "# a comment\n\nregex: \\d+ ms\\b\nreplace: TIME\n"


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ("regex: \\d+ ms\\b\n# why\nreplace: TIME\n", "nbval reads 0 of 1"),
        ("regex: \\d+ ms\\b\nreplace: \n", "no 'replace: TEXT'"),
        ("regex: \\d+ ms\\b\nreplace:\n", "nbval reads 0 of 1"),
        ("regex:\\d+ ms\\b\nreplace: TIME\n", "nbval reads 0 of 1"),
        ("regex: \\d+ ms\\b\n", "no 'replace: TEXT'"),
        ("replace: TIME\n", "no 'regex:' directly above"),
        ("regex: took .* ms\nreplace: TIME\n", "matches anything"),
        ("regex: took .+ ms\nreplace: TIME\n", "matches anything"),
        ("regex: took \\S+ ms\nreplace: TIME\n", "matches anything"),
        ("regex: took [^ ]+ ms\nreplace: TIME\n", "matches anything"),
        ("regex: \\d+ ms\\b \nreplace: TIME\n", "blanks"),
        ("reqex: \\d+ ms\nreplace: TIME\n", "neither a comment nor a rule"),
        (GOOD_RULE + "regex: \\d+ ms\\b\nreplace: AGAIN\n", "nbval reads 1 of 2"),
    ],
)
def test_a_broken_file_is_noticed(broken: str, complaint: str) -> None:
    assert file_problems(GOOD_RULE) == []
    assert any(complaint in problem for problem in file_problems(broken)), file_problems(broken)


@pytest.mark.parametrize("replacement", RULES)
def test_rule_changes_what_varies(replacement: str) -> None:
    for line, expected in RULES[replacement][0].items():
        assert re.sub(BY_REPLACEMENT[replacement], replacement, line) == expected
        assert sanitize(line, list(PATTERNS.items())) == expected, "another rule changes the line too"
        assert sanitize(expected, list(PATTERNS.items())) == expected, "the replacement is changed again"


@pytest.mark.parametrize("replacement", RULES)
def test_rule_leaves_the_rest_alone(replacement: str) -> None:
    for line in [*RULES[replacement][1], *RESULTS]:
        assert re.sub(BY_REPLACEMENT[replacement], replacement, line) == line


@pytest.mark.parametrize("replacement", RULES)
def test_rule_matches_no_bare_number(replacement: str) -> None:
    for number in (
        "0",
        "7",
        "12",
        "43211",
        "12000",
        "1,204",
        "0.31",
        "-0.5",
        "1e-05",
        "1.5e+10",
        "43%",
        "3/4",
    ):
        assert not re.search(BY_REPLACEMENT[replacement], number)
