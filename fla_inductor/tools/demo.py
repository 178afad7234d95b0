"""One run through everything: train a KDA language model compiled, generate with it, export it, and check each step."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from fla_inductor.tools import corpus, fusion, package
from fla_inductor.tools.byte_lm import ByteLM, ByteLMConfig

PROMPT = b"def main(argv: list[str]) -> int:\n    "
EXPORT_LENGTHS = (2, 64, 65, 200)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Size of the run on one kind of device."""

    model: ByteLMConfig
    batch: int
    length: int
    learning_rate: float
    generated: int
    dtype: torch.dtype
    tolerance: float
    """bound on the error ratio of two ways to compute the same thing: rounding of `dtype`, through the whole model"""


SETTINGS = {
    # one block: most of the run is compilation, whose time grows with the number of blocks
    "cpu": Settings(
        ByteLMConfig(num_layers=1),
        batch=8,
        length=256,
        learning_rate=3e-3,
        generated=150,
        dtype=torch.float32,
        tolerance=1e-3,
    ),
    "cuda": Settings(
        ByteLMConfig(hidden_size=1024, num_layers=8, num_heads=8, head_dim=128, mlp_size=2816),
        batch=16,
        length=2048,
        learning_rate=1e-3,
        generated=200,
        dtype=torch.bfloat16,
        tolerance=3e-2,
    ),
}


class Demo:
    """State of a run: the model, the text, and whether every comparison held."""

    def __init__(self, device: str, steps: int, text: Path | None, out: Path, console: Console) -> None:
        self.device = torch.device(device)
        self.settings = SETTINGS[self.device.type]
        self.steps = steps
        self.out = out
        self.console = console
        self.passed = True
        torch.manual_seed(0)
        data = corpus.load(text)
        window = self.settings.batch, self.settings.length + 1, self.device
        self.batches = corpus.Batches(data, *window)
        self.held_out = corpus.Batches(data, *window, held_out=True)
        self.model = ByteLM(self.settings.model).to(self.device)
        parameters = sum(p.numel() for p in self.model.parameters())
        source = "the standard library and this package" if text is None else str(text)
        self.say(f"text: {data.numel() / 1e6:.1f} MB from {source}; model: {parameters / 1e6:.2f} M parameters")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def check(self, what: str, held: bool, detail: str) -> None:
        """Report one comparison, and remember if it failed."""
        self.passed &= held
        verdict = "[green]ok[/]" if held else "[bold red]FAILED[/]"
        self.say(f"  {verdict} {what}: {escape(detail)}")

    def check_close(self, what: str, expected: Tensor, actual: Tensor, bound: float) -> None:
        ratio = error_ratio(expected, actual)
        self.check(what, ratio <= bound, f"error ratio {ratio:.1e} (bound {bound:.0e})")

    def autocast(self) -> torch.autocast:
        """Training in the device's working precision, with float32 parameters."""
        dtype = self.settings.dtype
        return torch.autocast(
            self.device.type, dtype=dtype if dtype != torch.float32 else None, enabled=dtype != torch.float32
        )

    def train(self) -> list[float]:
        """Compile the loss, compare it with the uncompiled one, and train; the losses of all steps are returned."""

        def loss(tokens: Tensor) -> Tensor:
            with self.autocast():
                return self.model.loss(tokens)

        batch = self.batches.draw()
        graph = fusion.trace(loss, batch)
        self.check(
            "one graph", graph.breaks == 0, f"{graph.breaks} graph breaks, {graph.calls.total()} calls of our operators"
        )
        expected, expected_gradients = self.loss_and_gradients(loss, batch)
        speed = self.tokens_per_second(lambda: self.loss_and_gradients(loss, batch), 2)

        compiled = torch.compile(loss, fullgraph=True)
        with self.timed("compiling forward and backward"):
            (value, gradients), kernels = fusion.compile_and_count(lambda: self.loss_and_gradients(compiled, batch))
        self.check_close("compiled loss equals uncompiled", expected, value, self.settings.tolerance)
        self.check_close(
            "compiled gradients equal uncompiled", expected_gradients, gradients, 10 * self.settings.tolerance
        )
        self.report_fusion(graph, kernels)

        losses = self.optimise(compiled)
        fast = self.tokens_per_second(lambda: self.loss_and_gradients(compiled, batch), 5)
        self.say(
            f"  forward and backward, tokens/s: compiled {fast:,.0f}, uncompiled {speed:,.0f} ({fast / speed:.2f}x)"
        )
        with torch.no_grad():
            held_out = torch.stack([loss(self.held_out.draw()) for _ in range(4)]).mean().item()
        detail = f"{losses[0]:.3f} to {losses[-1]:.3f} nats per byte; {held_out:.3f} on unseen text"
        self.check("the loss fell", held_out < losses[0], detail)
        return losses

    def loss_and_gradients(self, loss: Callable[[Tensor], Tensor], batch: Tensor) -> tuple[Tensor, Tensor]:
        self.model.zero_grad(set_to_none=True)
        value = loss(batch)
        value.backward()
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return value.detach(), torch.cat(gradients)

    def optimise(self, loss: Callable[[Tensor], Tensor]) -> list[float]:
        rate, warm_up = self.settings.learning_rate, max(1, self.steps // 10)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min((i + 1) / warm_up, max(0.1, 1 - i / self.steps))
        )
        losses: list[float] = []
        columns = (
            TextColumn("  training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
        )
        with Progress(*columns, TimeRemainingColumn(), console=self.console) as progress:
            task = progress.add_task("", total=self.steps, loss=float("nan"))
            for _ in range(self.steps):
                value, _ = self.loss_and_gradients(loss, self.batches.draw())
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                losses.append(value.item())
                progress.update(task, advance=1, loss=losses[-1])
        return losses

    def tokens_per_second(self, step: Callable[[], object], repeats: int) -> float:
        step()
        self.synchronise()
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        self.synchronise()
        return repeats * self.settings.batch * self.settings.length / (time.perf_counter() - start)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.console.status(what):
            yield
        self.say(f"  {what}: {time.perf_counter() - start:.0f} s")

    def report_fusion(self, graph: fusion.Graph, kernels: fusion.Kernels) -> None:
        """Print what became of our operators, and what was generated for the whole step."""
        table = Table("operator", "calls", "became", title="what fused (forward and backward)", title_justify="left")
        for op, calls in sorted(graph.calls.items()):
            table.add_row(op, str(calls), kernels.fate(op))
            if hasattr(torch.ops.fla_inductor, f"{op}_backward"):
                table.add_row(f"{op}_backward", str(calls), kernels.fate(f"{op}_backward"))
        self.console.print(table)
        library = ", ".join(f"{n} {name}" for name, n in kernels.extern.most_common())
        self.say(
            f"  generated: {len(kernels.fused)} fused kernels, {len(kernels.templates)} template kernels; "
            f"library calls: {library or 'none'}; our operators called whole: {kernels.called.total()}"
        )

    def generate(self, model: ByteLM) -> None:
        """Write text byte by byte with the recurrent step; the chunk path over the whole text must agree."""
        prompt = torch.tensor([list(PROMPT)], device=self.device)
        with self.timed(f"generating {self.settings.generated} bytes, one recurrent step each"):
            tokens, recurrent = model.generate(prompt, self.settings.generated, temperature=0.7)
        text = bytes(tokens[0].tolist()).decode(errors="replace")
        self.say(f"[dim]{escape(PROMPT.decode())}[/]{escape(text)}")
        with torch.no_grad():
            chunked = model(torch.cat([prompt, tokens[:, :-1]], 1))[:, len(PROMPT) - 1 :]
        self.check_close("recurrent logits equal chunk logits", chunked, recurrent, self.settings.tolerance)

    def export(self, model: ByteLM) -> None:
        """Compile ahead of time for any length, and run the package where fla_inductor is not imported."""
        inputs = [self.held_out.draw()[:2, :length].contiguous() for length in EXPORT_LENGTHS]
        path = self.out / "byte_lm.pt2"
        with self.timed("exporting with AOTInductor"):
            package.export(model, inputs[-1], path)
        try:
            with self.timed("running the package in a fresh process"):
                outputs = package.run_in_fresh_process(path, inputs)
        except RuntimeError as error:
            self.check("package runs without fla_inductor", False, str(error))
            return
        for tokens, output in zip(inputs, outputs, strict=True):
            with torch.no_grad():
                expected = model(tokens)
            what = f"package equals model, T = {tokens.shape[1]}"
            self.check_close(what, expected, output.to(self.device), self.settings.tolerance)
        self.say(f"  package: {path} ({path.stat().st_size / 1e6:.1f} MB)")

    def plot(self, losses: list[float]) -> None:
        """Save the loss curve."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(range(1, len(losses) + 1), losses)
        axes.set(
            xlabel="step", ylabel="loss (nats per byte)", title=f"byte-level KDA model, compiled, {self.device.type}"
        )
        axes.grid(alpha=0.3)
        path = self.out / "loss.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        self.say(f"  loss curve: {path}")


def error_ratio(expected: Tensor, actual: Tensor) -> float:
    """RMS(expected - actual) / RMS(expected), in float64; infinite if a value is not finite."""
    expected, actual = expected.double(), actual.double()
    ratio = ((expected - actual).square().mean().sqrt() / expected.square().mean().sqrt()).item()
    return ratio if ratio == ratio else float("inf")


def run(device: str, steps: int, text: Path | None, out: Path) -> bool:
    """The whole demonstration; True if every comparison held."""
    # PyTorch's, about calls inside PyTorch
    warnings.simplefilter("ignore", FutureWarning)
    console = Console()
    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    console.rule(f"fla_inductor on {device}, torch {torch.__version__}")
    demo = Demo(device, steps, text, out, console)
    console.rule("train", align="left")
    losses = demo.train()
    demo.plot(losses)
    model = copy.deepcopy(demo.model).to(demo.settings.dtype).eval()
    console.rule("generate", align="left")
    demo.generate(model)
    console.rule("export", align="left")
    demo.export(model)
    verdict = "[green]every comparison held[/]" if demo.passed else "[bold red]a comparison failed[/]"
    console.rule(f"{verdict}, {time.perf_counter() - start:.0f} s")
    return demo.passed
