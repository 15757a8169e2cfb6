"""``python -m benchmarks.models``: models that others wrote, with and without this package.

One training script runs unchanged in two processes that differ by one environment variable:
without it PyTorch's own cuDNN backend computes the attention, with ``TORCH_CUDNN_MHA_ENABLED=1``
this package does. Losses and logits must agree, and the package's counters must show that it
served the calls. The two processes train in turns, so that what disturbs the machine disturbs
both; ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.worker import PATIENCE, DiedError

ENABLED = "TORCH_CUDNN_MHA_ENABLED"
ROOT = Path(__file__).resolve().parents[1]

LEARNING_STEPS = 6
"""Steps whose losses are compared; they also warm up whatever compiles or caches."""

ROUND_STEPS = 2
ROUNDS = 6

SAMPLE = 4096
"""Logits that are compared, drawn at random from all of them."""

# Two right kernels round differently in bfloat16, and AdamW makes full steps of gradients that are
# hardly more than rounding, so that trainings drift apart. Measured on a CPU with these models at
# a length of 128, PyTorch's kernel against one that rounds the probabilities to bfloat16: losses
# up to 0.07 % and logits up to 4.3 % apart. Both tolerances lie above that, and below what faults
# do: with the gradient of the key lost, losses of llama and gpt are 1.4 and 0.6 % apart, with the
# padding mask lost those of bert 4.8 %, with the gradient of the value lost all logits over 16 %.
# Finer faults are for the tests, which compare each gradient with float64.
LOSS_TOLERANCE = 2**-9
LOGITS_TOLERANCE = 2**-4


# ---------------------------------------------------------------------------------- user's code

Forward = Callable[[], tuple[Tensor, Tensor]]
"""Computes loss and logits of the one batch that a model is trained on."""


@dataclass(frozen=True)
class Scene:
    """Where and how large: ``tiny`` fits a CPU and a test."""

    device: torch.device
    tiny: bool

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full


def llama(scene: Scene) -> tuple[nn.Module, Forward]:
    """A Llama-style decoder of ``transformers`` whose query heads share key heads."""
    transformers: Any = importlib.import_module("transformers")
    size = scene.size
    config = transformers.LlamaConfig(
        vocab_size=size(32000, 128),
        hidden_size=size(1024, 64),
        intermediate_size=size(2816, 128),
        num_hidden_layers=size(8, 2),
        num_attention_heads=size(16, 4),
        num_key_value_heads=size(4, 2),
        max_position_embeddings=size(1024, 32),
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(config.vocab_size, (size(4, 2), config.max_position_embeddings))

    def forward() -> tuple[Tensor, Tensor]:
        output = model(input_ids=tokens, labels=tokens)
        return output.loss, output.logits

    return model, forward


def bert(scene: Scene) -> tuple[nn.Module, Forward]:
    """BERT of ``transformers``: masked words are guessed in sequences padded to one length."""
    transformers: Any = importlib.import_module("transformers")
    size = scene.size
    config = transformers.BertConfig(
        vocab_size=size(30522, 128),
        hidden_size=size(768, 64),
        intermediate_size=size(3072, 128),
        num_hidden_layers=size(12, 2),
        num_attention_heads=size(12, 4),
        max_position_embeddings=size(512, 32),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    model = transformers.BertForMaskedLM(config)
    batch, length = size(16, 4), config.max_position_embeddings
    words = torch.randint(config.vocab_size, (batch, length))
    lengths = torch.linspace(length // 8, length, batch).long()
    real = torch.arange(length) < lengths[:, None]
    hidden = (torch.rand(batch, length) < 0.15) & real
    inputs = words.masked_fill(hidden, 103).where(real, 0)  # BERT's [MASK] and [PAD]
    labels = words.where(hidden, -100)
    mask = real.long()

    def forward() -> tuple[Tensor, Tensor]:
        output = model(input_ids=inputs, attention_mask=mask, labels=labels)
        return output.loss, output.logits

    return model, forward


def vit(scene: Scene) -> tuple[nn.Module, Forward]:
    """The Vision Transformer of ``timm``: 197 tokens, no mask."""
    timm: Any = importlib.import_module("timm")
    small = {"img_size": 32, "embed_dim": 64, "depth": 2, "num_heads": 4} if scene.tiny else {}
    model = timm.create_model("vit_base_patch16_224", **small)
    batch, pixels = scene.size(64, 4), scene.size(224, 32)
    images = torch.randn(batch, 3, pixels, pixels)
    classes = torch.randint(1000, (batch,))

    def forward() -> tuple[Tensor, Tensor]:
        logits = model(images)
        return F.cross_entropy(logits, classes), logits

    return model, forward


class Block(nn.Module):
    """One layer of a GPT, with query, key and value out of one projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(x)
        return y


def gpt(scene: Scene) -> tuple[nn.Module, Forward]:
    """A GPT in plain PyTorch, its causal attention without a mask."""
    size = scene.size
    width, length, words = size(768, 64), size(1024, 32), size(50304, 128)
    blocks = [Block(width, size(12, 4)) for _ in range(size(12, 2))]
    embedding, positions = nn.Embedding(words, width), nn.Embedding(length, width)
    body = nn.Sequential(*blocks, nn.LayerNorm(width))
    nn.init.normal_(embedding.weight, std=0.02)  # also the output's weight, so no larger
    model = nn.ModuleList([embedding, positions, body])
    tokens = torch.randint(words, (size(8, 2), length + 1))

    def forward() -> tuple[Tensor, Tensor]:
        x = body(embedding(tokens[:, :-1]) + positions.weight)
        logits = F.linear(x, embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), logits

    return model, forward


MODELS: Mapping[str, Callable[[Scene], tuple[nn.Module, Forward]]] = {
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "gpt": gpt,
}
OPTIONAL = ("transformers", "timm")
PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Picks(TorchDispatchMode):
    """Collects which attention operators PyTorch picks, in the forward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name: str = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product") and "backward" not in name:
            self.names.add(name.removeprefix("_scaled_dot_product_").replace("_attention", ""))
        return func(*args, **(kwargs or {}))


class Training:
    """A model, its one batch and its optimizer, the same in every process."""

    def __init__(self, name: str, scene: Scene) -> None:
        torch.manual_seed(0)
        self.name = name
        self.device = scene.device.type
        with scene.device:
            self.model, self.loss_and_logits = MODELS[name](scene)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Mixed precision: with weights in bfloat16, their rounding would hide small faults."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            return self.loss_and_logits()

    def step(self) -> Tensor:
        loss, _ = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def learn(self) -> dict[str, Any]:
        """The first steps, and what the model says after them."""
        self.model.train()
        with Picks() as picks:
            losses = [self.step()]
        losses += [self.step() for _ in range(LEARNING_STEPS - 1)]
        self.model.eval()
        with torch.no_grad():
            logits = self.forward()[1].float().flatten()
        self.model.train()
        chosen = torch.randint(
            logits.numel(), (SAMPLE,), generator=torch.Generator().manual_seed(1)
        )
        return {
            "losses": [loss.item() for loss in losses],
            "logits": logits[chosen.to(logits.device)].tolist(),
            "not_finite": int((~logits.isfinite()).sum()),
            "kernels": sorted(picks.names),
        }

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def time(self, steps: int) -> float:
        """Milliseconds of a step, the mean of several."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.synchronize()
        return (time.perf_counter() - start) / steps * 1e3


# --------------------------------------------------------------------------------------- worker


def environment(scene: Scene) -> dict[str, str]:
    """What the numbers depend on."""
    found = {"torch": str(torch.__version__), "device": "CPU"}
    if scene.device.type == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["cuDNN"] = str(torch.backends.cudnn.version())
    return found


def counters() -> dict[str, int]:
    """Calls that this package served and gave back, in all; empty where it is not switched on.

    Called after a model was trained, so that the import cannot be what switches it on.
    """
    if os.environ.get(ENABLED) != "1":
        return {}
    from cudnn_mha import status

    found = status()
    return {name: getattr(found, name) for name in ("served", "served_backward", "fallbacks")}


def work(scene: Scene) -> None:
    """Says where it runs, then answers each line ``MODEL STEPS`` of standard input with JSON.

    A model's first line trains it for `LEARNING_STEPS` before the steps that are timed.
    """

    def say(answer: Mapping[str, object]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    answers = sys.stdout
    training: Training | None = None
    before: dict[str, int] = {}  # the counters when this model came
    counted = before
    with contextlib.redirect_stdout(sys.stderr), sdpa_kernel(PRIORITY, set_priority=True):
        say(environment(scene))
        for line in sys.stdin:
            name, steps = line.split()
            answer: dict[str, object] = {}
            try:
                if training is None or training.name != name:
                    training, before = None, counted
                    gc.collect()  # models refer to themselves
                    torch.cuda.empty_cache()
                    training = Training(name, scene)
                    answer |= training.learn()
                if int(steps):
                    answer["milliseconds"] = training.time(int(steps))
                counted = counters()
                answer |= {key: count - before.get(key, 0) for key, count in counted.items()}
            except Exception as error:
                if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL:
                    answer = {"missing": f"{error.name} is not installed"}
                else:
                    traceback.print_exc()
                    answer = {"failure": f"{type(error).__name__}: {error}"}
            say(answer)
        if counted:
            from cudnn_mha import status

            print(status(), file=sys.stderr)  # among others, why calls were given back


# --------------------------------------------------------------------------------------- parent


class Process:
    """A worker, in an environment with the variable or without."""

    def __init__(self, arguments: Sequence[str], *, enabled: bool) -> None:
        variables = {name: value for name, value in os.environ.items() if name != ENABLED}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.models", "--worker", *arguments],
            cwd=ROOT,
            env=variables | ({ENABLED: "1"} if enabled else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, name: str, steps: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # `hear` says what became of the process
            self._process.stdin.write(f"{name} {steps}\n")
            self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            DiedError: there will be none.
        """
        assert self._process.stdout is not None
        watch = threading.Timer(PATIENCE, self._process.kill)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            raise DiedError(f"a process died with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """Lets it end by itself, and ends it where it does not."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


@dataclass
class Run:
    """What one process made of one model.

    Attributes:
        losses: of the learning steps.
        logits: a sample of them after the learning steps.
        not_finite: how many of all logits are no finite numbers.
        kernels: the attention operators that PyTorch picked.
        milliseconds: of a step, for each round.
        served, served_backward, fallbacks: attention calls that the package computed and gave
            back; None where it is not switched on.
    """

    losses: list[float]
    logits: list[float]
    not_finite: int = 0
    kernels: list[str] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    served: int | None = None
    served_backward: int | None = None
    fallbacks: int | None = None


@dataclass
class Row:
    """One model in both processes.

    Attributes:
        loss_distance, logits_distance: see the functions of these names.
        ratio: median over the rounds of our step time divided by theirs in the same round.
        skipped: why it was not run, which is no failure.
        faults: everything that is wrong.
    """

    model: str
    theirs: Run | None = None
    ours: Run | None = None
    loss_distance: float | None = None
    logits_distance: float | None = None
    ratio: float | None = None
    skipped: str | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return self.skipped or "; ".join(self.faults) or "agrees"


def loss_distance(ours: Run, theirs: Run) -> float:
    """The largest difference of the losses, relative to the first: later ones may be near 0."""
    pairs = zip(ours.losses, theirs.losses, strict=True)
    return max(abs(a - b) for a, b in pairs) / abs(theirs.losses[0])


def logits_distance(ours: Run, theirs: Run) -> float:
    """Length of the logits' difference relative to their own."""
    return math.dist(ours.logits, theirs.logits) / math.hypot(*theirs.logits)


def judge(model: str, ours: Run, theirs: Run, *, counted: bool) -> Row:
    """Compares what both processes made of a model.

    Args:
        counted: whether the package must have served calls: it cannot without a GPU.
    """
    losses, logits = loss_distance(ours, theirs), logits_distance(ours, theirs)
    row = Row(model, theirs, ours, losses, logits)
    if ours.milliseconds:
        pairs = zip(ours.milliseconds, theirs.milliseconds, strict=True)
        row.ratio = statistics.median(a / b for a, b in pairs)
    for name, run in (("PyTorch", theirs), ("ours", ours)):
        bad = sum(not math.isfinite(loss) for loss in run.losses)
        if bad or run.not_finite:
            row.faults.append(f"{name}: {bad} losses, {run.not_finite} logits are not finite")
    finite = not row.faults
    for what, apart, tolerance in (
        ("losses", losses, LOSS_TOLERANCE),
        ("logits", logits, LOGITS_TOLERANCE),
    ):
        if finite and apart > tolerance:
            row.faults.append(f"{what} differ by {apart:.2%}, more than {tolerance:.2%}")
    if counted and not ours.served:
        row.faults.append("not one call was served")
    return row


def compare(model: str, ours: Process, theirs: Process, rounds: int, *, counted: bool) -> Row:
    """Trains a model in both processes, at once, and then times it in turns.

    Args:
        rounds: of `ROUND_STEPS` each.
        counted: as for `judge`.

    Raises:
        DiedError: a process ended.
    """
    processes = {"ours": ours, "PyTorch": theirs}
    for process in processes.values():
        process.tell(model, 0)
    answers = {name: process.hear() for name, process in processes.items()}
    for name, answer in answers.items():
        if "missing" in answer:
            return Row(model, skipped=f"skipped: {answer['missing']}")
        if "failure" in answer:
            return Row(model, faults=[f"{name}: {answer['failure']}"])
    runs = {name: Run(**answer) for name, answer in answers.items()}
    for turn in range(rounds):
        for name in list(processes)[:: -1 if turn % 2 else 1]:
            processes[name].tell(model, ROUND_STEPS)
            answer = processes[name].hear()
            if "failure" in answer:
                return Row(model, faults=[f"{name}: {answer['failure']}"])
            runs[name].milliseconds.append(answer.pop("milliseconds"))
            runs[name] = replace(runs[name], **answer)  # the counters have gone on
    return judge(model, runs["ours"], runs["PyTorch"], counted=counted)


def cells(row: Row) -> list[str]:
    """The row as the table shows it."""
    from cudnn_mha.printing import number_text

    if row.ours is None or row.theirs is None:
        return [row.model, *["-"] * 10, row.verdict]
    times = [
        number_text(statistics.median(run.milliseconds) if run.milliseconds else None, ".2f")
        for run in (row.theirs, row.ours)
    ]
    return [
        row.model,
        ", ".join(row.theirs.kernels),
        f"{row.theirs.losses[0]:.3f} to {row.theirs.losses[-1]:.3f}",
        number_text(row.loss_distance, ".3%"),
        number_text(row.logits_distance, ".2%"),
        number_text(row.ours.served, "d"),
        number_text(row.ours.served_backward, "d"),
        number_text(row.ours.fallbacks, "d"),
        *times,
        number_text(row.ratio, ".3f"),
        row.verdict,
    ]


def show(rows: Sequence[Row]) -> None:
    """Prints the table."""
    from cudnn_mha import printing

    printing.console().print(
        printing.table(
            None,
            [cells(row) for row in rows],
            *("model", "PyTorch picks", "loss", ">losses apart", ">logits apart"),
            *(">served", ">backward", ">given back"),
            *(">PyTorch ms", ">ours ms", ">ratio", "verdict"),
        )
    )


def write_json(path: Path, found: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Every number but the logits; null where it is not finite."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items() if name != "logits"}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    tolerances = {"losses": LOSS_TOLERANCE, "logits": LOGITS_TOLERANCE}
    records = [{**asdict(row), "verdict": row.verdict} for row in rows]
    whole = {"environment": found, "tolerances": tolerances, "rows": records}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain(whole), indent=1, allow_nan=False) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", action="append", choices=MODELS, help="only this; repeatable")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in which steps are timed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, for tests")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the file")
    parser.add_argument("--worker", action="store_true", help="train as standard input says")
    options = parser.parse_args(arguments)
    if options.rounds <= 0:
        parser.error("--rounds must be positive")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 all agree, 1 something disagrees, was not served, or nothing was compared."""
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this needs an NVIDIA GPU that torch can use; none is here", file=sys.stderr)
        return 1
    if options.worker:
        work(Scene(torch.device(options.device), options.tiny))
        return 0
    start = time.monotonic()
    shared = ["--device", options.device, *["--tiny"] * options.tiny]
    ours, theirs = (Process(shared, enabled=enabled) for enabled in (True, False))
    rows = []
    try:
        found, _ = ours.hear(), theirs.hear()
        print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
        for model in options.model or MODELS:
            counted = options.device == "cuda"
            rows.append(compare(model, ours, theirs, options.rounds, counted=counted))
    except DiedError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    finally:
        for process in (ours, theirs):
            process.stop()
    show(rows)
    path = options.out / "models.json"
    write_json(path, found, rows)
    print(f"{time.monotonic() - start:.0f} s; numbers in {path}")
    compared = any(row.ours for row in rows)
    return 1 if not compared or any(row.faults for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
