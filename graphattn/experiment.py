"""What small experiments have in common: options, training, time and memory, a page of results.

The example scripts are written with it; so can yours be. It needs the ``viz`` extra (rich, tqdm,
matplotlib) for what it prints and draws.
"""

from __future__ import annotations

import argparse
import ctypes
import inspect
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import graphattn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Measured",
    "PeakMemory",
    "Report",
    "Trained",
    "commit",
    "cpu_model",
    "figure",
    "integer",
    "measure",
    "number",
    "option_parser",
    "threads",
    "train",
    "warmup_cosine",
]

# Options ##########################################################################################


def integer(least: int) -> Callable[[str], int]:
    """The ``type`` of an option that is an integer of at least ``least``, for argparse."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text}")
        return value

    parse.__name__ = "integer"
    return parse


def number(least: float, most: float = math.inf) -> Callable[[str], float]:
    """The ``type`` of an option that is a number from ``least`` to ``most``, for argparse."""

    def parse(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            bounds = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
            raise argparse.ArgumentTypeError(f"must be a number {bounds}, got {text}")
        return value

    parse.__name__ = "number"
    return parse


def threads(text: str) -> int:
    """The ``type`` of an option that is the number of CPU threads: sets it, for argparse."""
    count = integer(1)(text)
    torch.set_num_threads(count)
    return count


def option_parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that every experiment has; add your own to it.

    ``--quick`` (a tiny run that shows that all works), ``--seed``, ``--threads``, and ``--out``,
    the folder that :class:`Report` writes into.

    Args:
        doc: The script's docstring; its first line is the description.
    """
    parser = argparse.ArgumentParser(description=doc.strip().splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run, to see that all works")
    parser.add_argument("--seed", type=integer(0), default=0)
    parser.add_argument("--threads", type=threads, help="CPU threads (default: torch's choice)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the results")
    return parser


# Training #########################################################################################


class Trained(NamedTuple):
    """What :func:`train` returns: the loss of each step, and the seconds of all."""

    losses: list[float]
    seconds: float


def warmup_cosine(step: int, *, steps: int, warmup: int = 0) -> float:
    """The learning rate of step ``step``, from 0, over its highest: linear, then half a cosine.

    >>> [warmup_cosine(step, steps=4, warmup=2) for step in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    *,
    steps: int,
    lr: float,
    warmup: int = 0,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    until: Callable[[], bool] | None = None,
    name: str = "train",
) -> Trained:
    """Minimises a loss with AdamW, a linear warm-up and a cosine decay, and shows the progress.

    The gradient's norm is clipped. The model is in training mode meanwhile and in evaluation mode
    after.

    Args:
        model: What is trained.
        loss: The loss of step ``i``, from 0: draws its batch and runs the model.
        steps: Number of steps.
        lr: Highest learning rate, reached after ``warmup`` steps; the last step's is near 0.
        warmup: Steps in which the rate grows to ``lr``.
        weight_decay: As in ``torch.optim.AdamW``.
        clip: Largest norm of the gradient of all parameters.
        until: Asked after each step whether enough is learned; training then ends early.
        name: What the progress bar says.

    Raises:
        ValueError: A loss is NaN or infinite.
    """
    from tqdm import tqdm

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    rate = partial(warmup_cosine, steps=steps, warmup=warmup)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses: list[float] = []
    start = time.perf_counter()
    model.train()
    with tqdm(total=steps, desc=name, unit="step", dynamic_ncols=True, disable=None) as bar:
        for step in range(steps):
            value = loss(step)
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            losses.append(value.item())
            if not math.isfinite(losses[-1]):
                raise ValueError(f"train: the loss of step {step} of {name} is {losses[-1]}.")
            bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
            bar.update(1)
            if until is not None and until():
                break
    model.eval()
    return Trained(losses, time.perf_counter() - start)


# Time and memory ##################################################################################


class PeakMemory:
    """Counts the bytes that a block of code needs at its peak, above what was held before.

    On CUDA those of torch's allocator. On a CPU the resident memory of the process, which Linux and
    glibc tell; ``bytes`` is ``None`` elsewhere. Once :func:`graphattn.keep_pages` was called, freed
    memory stays with the process and hides later peaks: measure before.

    Attributes:
        bytes: The peak, once the block is left.

    >>> with PeakMemory(torch.device("cpu")) as peak:
    ...     _ = torch.ones(4_000_000)
    >>> peak.bytes is None or peak.bytes > 10_000_000
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        self._before = self._reset()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            self.bytes = max(0, self._peak() - self._before)

    def _reset(self) -> int | None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return torch.cuda.memory_allocated(self.device)
        try:
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps some of what is freed
            Path("/proc/self/clear_refs").write_text("5")
        except (AttributeError, OSError):  # not glibc, not Linux, or not allowed
            return None
        return self._peak()

    def _peak(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device)
        status = Path("/proc/self/status").read_text()
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
        return 0 if found is None else int(found[1]) * 1024


class Measured(NamedTuple):
    """What :func:`measure` returns: median seconds, and bytes at the peak or ``None``."""

    seconds: float
    bytes: int | None


def measure(
    step: Callable[[], object], *, repeats: int = 3, device: torch.device | None = None
) -> Measured:
    """Time and peak memory of a piece of work.

    Args:
        step: The work. It runs once to warm up, once for the memory, and ``repeats`` times.
        repeats: How many times are taken, of which the median counts.
        device: Default CPU.
    """
    device = torch.device("cpu") if device is None else device
    step()
    with PeakMemory(device) as peak:
        step()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return Measured(statistics.median(seconds), peak.bytes)


def cpu_model() -> str:
    """The name of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return platform.processor() or platform.machine() if found is None else found[1]


def commit() -> str:
    """Of the checkout that graphattn is imported from; ``+dirty`` if it was changed since."""

    def git(*arguments: str) -> str:
        folder = Path(graphattn.__file__).parent
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# The report #######################################################################################


class Report:
    """Results of a script: shown as they come, and kept as a page with its pictures and numbers.

    Writes ``NAME.md`` (what the script is about, the command, tables, pictures), ``NAME.json``
    (the same numbers, options, versions) and ``NAME-*.png`` into a folder, ``NAME`` being that of
    the script.

    Args:
        script: The script's ``__file__``.
        doc: The script's docstring: the first line is the title, the rest opens the page.
        args: Its options, ``out`` among them.

    >>> import tempfile
    >>> args = argparse.Namespace(out=Path(tempfile.mkdtemp()), quick=True)
    >>> report = Report("sums.py", "Sums of numbers.", args)
    >>> report.table("Sums", [{"numbers": "1 + 1", "sum": 2}])  # doctest: +ELLIPSIS
    <BLANKLINE>
    ...
    >>> report.write()  # doctest: +ELLIPSIS
    Written: ...sums.md
    """

    def __init__(self, script: str, doc: str, args: argparse.Namespace) -> None:
        self.name, self.args = Path(script).stem, args
        title, _, text = inspect.cleandoc(doc).partition("\n")
        self._start, self._commit = time.perf_counter(), commit()  # before anything is written
        self._pictures = 0
        self._tables: dict[str, list[dict[str, Any]]] = {}
        self._page = [f"# {title.rstrip('.')}", text.strip(), self._setting()]

    def table(self, title: str, rows: Sequence[dict[str, Any]]) -> None:
        """Prints a table, and keeps it for the page.

        Args:
            title: What it shows.
            rows: Each row as ``{column: value}``, all with the same columns; text or whole numbers
                as they shall be shown, other numbers with three digits, ``None`` as a dash.
        """
        from rich.console import Console
        from rich.table import Table

        shown = Table(title=title)
        columns = list(rows[0])
        numeric = {c: all(not isinstance(row[c], str) for row in rows) for c in columns}
        for column in columns:
            shown.add_column(column, justify="right" if numeric[column] else "left")
        cells = [[_cell(row[column]) for column in columns] for row in rows]
        for line in cells:
            shown.add_row(*line)
        print()
        Console(width=None if sys.stdout.isatty() else 140).print(shown)
        self._tables[title] = list(rows)
        lines = [columns, ["---:" if numeric[c] else "---" for c in columns], *cells]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        self._page.append(f"## {title}\n\n{table}")

    def text(self, text: str) -> None:
        """Prints a paragraph of Markdown, and keeps it for the page."""
        print(f"\n{text}")
        self._page.append(text)

    def picture(self, figure: Figure, caption: str) -> None:
        """Saves a matplotlib figure and puts it on the page."""
        self._pictures += 1
        self.args.out.mkdir(parents=True, exist_ok=True)
        path = self.args.out / f"{self.name}-{self._pictures}.png"
        figure.savefig(path, dpi=120, metadata={"Software": None})
        self._page.append(f"![{caption}]({path.name})\n\n{caption}")

    def write(self) -> None:
        """Writes the page and the numbers."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        minutes = (time.perf_counter() - self._start) / 60
        self._page.append(f"The whole run took {minutes:.1f} minutes.")
        page, numbers = (self.args.out / f"{self.name}.{kind}" for kind in ("md", "json"))
        page.write_text("\n\n".join(part for part in self._page if part) + "\n", encoding="utf-8")
        result = {
            "command": _command(),
            "commit": self._commit,
            "cpu": cpu_model(),
            "threads": torch.get_num_threads(),
            "versions": {"graphattn": graphattn.__version__, "torch": torch.__version__},
            "options": {name: str(value) for name, value in sorted(vars(self.args).items())},
            "minutes": minutes,
            "tables": self._tables,
        }
        text = json.dumps(result, indent=1, ensure_ascii=False)
        numbers.write_text(text + "\n", encoding="utf-8")
        print(f"Written: {page}")

    def _setting(self) -> str:
        count = torch.get_num_threads()
        threads = f"{count} thread{'s' if count > 1 else ''}"
        return (
            f"```bash\n{_command()}\n```\n\n"
            f"Figures of {threads} of {cpu_model()}, torch {torch.__version__}."
        )


def figure(
    columns: int = 1, *, rows: int = 1, width: float = 4.5, height: float = 3.6
) -> tuple[Figure, Any]:
    """An empty matplotlib figure for :meth:`Report.picture`, drawn without a screen.

    Args:
        columns: Panels side by side.
        rows: Panels one above the other.
        width: Of a panel, in inches.
        height: Of a panel, in inches.

    Returns:
        ``(figure, axes)``: ``axes`` is one, or an array of them.
    """
    from matplotlib.figure import Figure  # without pyplot, which would keep it until closed

    drawing = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return drawing, drawing.subplots(rows, columns)


def _command() -> str:
    return " ".join(["python", *sys.argv])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
