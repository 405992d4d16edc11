"""The `warpwave` command.

Only typer is imported before a command runs: torch takes seconds, and `--help` should not. A mistake in what the user
asked for ends in one sentence on stderr and exit code 2; a check that fails ends in exit code 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem

if TYPE_CHECKING:
    from warpwave.problem import AttentionProblem

app = typer.Typer(
    help="Exact attention on GPUs, and what it costs.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

DTYPES = {
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "fp32": "float32",
}


def main() -> None:
    """Entry point of the console script."""
    try:
        app(prog_name="warpwave")
    except (InvalidInput, InvalidType, UnsupportedProblem) as error:
        print(f"warpwave: {error}", file=sys.stderr)
        sys.exit(2)


def _show_version(asked: bool) -> None:
    if asked:
        from warpwave import __version__

        print(f"warpwave {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
) -> None:
    """Compare our attention with torch's inside a real transformer.

    The answers have to be the same; the times stand side by side.
    """
    import torch

    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is not a device; use cpu or cuda", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU here; use --device cpu", param_hint="--device")
    from warpwave.demo import run

    raise typer.Exit(run(device))


@app.command()
def explain(
    batch: Annotated[int, typer.Option(min=0, help="Sequences.")] = 1,
    seqlen_q: Annotated[int, typer.Option(min=0, help="Queries in each sequence.")] = 4096,
    seqlen_k: Annotated[int | None, typer.Option(min=0, help="Keys in each sequence. Default: seqlen-q.")] = None,
    heads: Annotated[int, typer.Option(min=0, help="Query heads.")] = 16,
    heads_kv: Annotated[int | None, typer.Option(min=0, help="Key and value heads. Default: heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=0, help="Width of q and k.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(min=0, help="Width of v and out. Default: head-dim.")] = None,
    dtype: Annotated[str, typer.Option(help="float16 (fp16), bfloat16 (bf16) or float32 (fp32).")] = "bfloat16",
    causal: Annotated[bool, typer.Option("--causal", help="Causal mask, aligned to the last key.")] = False,
    causal_top_left: Annotated[
        bool, typer.Option("--causal-top-left", help="Causal mask, aligned to the first key, as torch's is_causal.")
    ] = False,
    window: Annotated[
        str, typer.Option(metavar="LEFT,RIGHT", help="Sliding window: keys seen before and after; -1 is unlimited.")
    ] = "-1,-1",
    softcap: Annotated[float, typer.Option(help="Scores become softcap * tanh(score / softcap); 0 is off.")] = 0.0,
    sinks: Annotated[bool, typer.Option("--sinks", help="One more logit a head in the denominator.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi slopes, one a head.")] = False,
    lse: Annotated[bool, typer.Option("--lse", help="Return the log-sum-exp as well.")] = False,
    grad: Annotated[bool, typer.Option("--grad", help="Gradients will be asked for.")] = False,
    precision: Annotated[str, typer.Option(help="For float32: default, ieee, tf32x3 or tf32.")] = "default",
    gpu: Annotated[
        str | None, typer.Option(metavar="ARCH", help="sm_90, gfx942, ..., or cpu. Default: this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which kernel serves a call, and why not the others.

    The call is described by its shapes and options; nothing is run. Also printed: its operations, and the bytes that
    any implementation has to move.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not a dtype; use {', '.join(DTYPES)}", param_hint="--dtype")
    if causal and causal_top_left:
        raise typer.BadParameter("give --causal or --causal-top-left, not both", param_hint="--causal-top-left")
    import torch

    from warpwave.checks import Options, describe_call
    from warpwave.problem import Operands

    def tensor(*shape: int, dtype: str = DTYPES[dtype]) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        except RuntimeError:  # what torch says of a size that overflows 64 bits
            raise typer.BadParameter(f"no tensor can have {' x '.join(map(str, shape))} elements") from None

    # The same checks as a real call, on tensors without storage.
    left, right = _window(window)
    keys, kv_heads = seqlen_q if seqlen_k is None else seqlen_k, heads if heads_kv is None else heads_kv
    problem = describe_call(
        Operands(
            q=tensor(batch, seqlen_q, heads, head_dim),
            k=tensor(batch, keys, kv_heads, head_dim),
            v=tensor(batch, keys, kv_heads, head_dim if head_dim_v is None else head_dim_v),
            alibi_slopes=tensor(heads, dtype="float32") if alibi else None,
            sinks=tensor(heads, dtype="float32") if sinks else None,
        ),
        Options(
            causal="bottom_right" if causal else "top_left" if causal_top_left else "",
            window_left=left,
            window_right=right,
            softcap=softcap,
            precision=precision,
            return_lse=lse,
            needs_grad=grad,
        ),
    )
    _print_explanation(problem, gpu, as_json)


def _window(text: str) -> tuple[int, int]:
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not two whole numbers; write 128,0", param_hint="--window") from None
    return left, right


def _print_explanation(problem: AttentionProblem, arch: str | None, as_json: bool) -> None:
    import dataclasses
    import json

    import warpwave
    from warpwave.hardware.gpu import Gpu

    try:
        gpu = None if arch is None else Gpu.for_arch(arch)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from None
    explanation = warpwave.explain(problem, gpu=gpu)
    if as_json:
        least = {"flops": explanation.flops, "compulsory_bytes": explanation.compulsory_bytes}
        print(json.dumps(dataclasses.asdict(explanation) | least, indent=2))
    else:
        print(explanation)


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(help="Name of a suite in warpwave/bench/suites, or a path to one.")],
    out: Annotated[Path | None, typer.Option(help="Append the records, JSON Lines, to this file.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times each contender takes its turn; 6 for intervals.")] = 9,
    kernel: Annotated[list[str] | None, typer.Option(help="Kernel of ours to measure; repeat for more.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records instead of tables.")] = False,
) -> None:
    """Time our kernels against their peers, each checked first."""
    from warpwave.bench.run import main as run

    raise typer.Exit(
        run(suite, out=out, rounds=rounds, json_output=as_json, kernels=kernel or ("auto",), device=device)
    )
