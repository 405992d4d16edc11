"""The `warpwave` command.

Only typer is imported before a command runs: torch takes seconds, and `--help` should not. A mistake in what the user
asked for ends in one sentence on stderr and exit code 2; a check that fails ends in exit code 1.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.workbench.call_options import describes_a_call
from warpwave.workbench.entry import is_of_the_extra, what_to_install
from warpwave.workbench.terminal import OutputLost, complain, discard_output, prepare_streams, say

if TYPE_CHECKING:
    from warpwave.problem import AttentionProblem

app = typer.Typer(
    help="Exact attention on GPUs, and what it costs.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def command() -> NoReturn:
    """Entry point of the console script: `main`, and an exit without delay."""
    gc.set_threshold(100_000)  # torch's import makes a million objects that stay, and walking them again takes 0.2 s
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = _exit_code(ended)
    _exit(code)


def main() -> None:
    """The command, its arguments from `sys.argv`. Ends with SystemExit."""
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        # A reader that has seen enough (`| head`) ends the command as it ends any other, without a word.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        prepare_streams()
        app(prog_name="warpwave")
    except (InvalidInput, InvalidType, UnsupportedProblem) as error:
        complain(error)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if not is_of_the_extra(error):
            raise
        complain(what_to_install(error))
        sys.exit(2)
    except OutputLost as lost:
        _give_up(str(lost))
    except OSError as error:
        if error.filename is not None:  # not of a stream that is open already, which typer prints help and usage to
            raise
        _give_up(error.strerror or str(error))


def _give_up(why: str) -> NoReturn:
    """Ends a command whose output nobody can read."""
    complain(f"the output could not be written: {why}")
    discard_output()
    sys.exit(2)


def _exit_code(ended: SystemExit) -> int:
    """What the shell is told. Python prints an argument that is no number, and exits with 1."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    say(ended.code, to=sys.stderr)
    return 1


def _exit(code: int) -> NoReturn:
    """Ends the process as `sys.exit` does, but for taking torch's modules apart, which needs a third of a second."""
    atexit._run_exitfuncs()
    try:
        say(end="", flush=True)
    except OutputLost as lost:
        complain(f"the output could not be written: {lost}")
        code = 2
    say(end="", to=sys.stderr, flush=True)
    os._exit(code)


def _show_version(asked: bool) -> None:
    if asked:
        from warpwave import __version__

        say(f"warpwave {__version__}")
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
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the report goes, one HTML file.")] = Path(
        "report.html"
    ),
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print every table, and why each other kernel did not run.")
    ] = False,
) -> None:
    """Compare warpwave's attention with torch's inside a real transformer.

    The verdict is printed first, then the checks and times in short, then where the report is. Without a GPU, the
    report shows an H200's record beside the CPU's own numbers. A file that is not a report is never overwritten.
    """
    import torch

    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is not a device; use cpu or cuda", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU here; use --device cpu", param_hint="--device")
    from warpwave.workbench.demo.demo import run

    raise typer.Exit(run(device, out, verbose))


@app.command()
@describes_a_call
def explain(
    context: typer.Context,
    problem: AttentionProblem | None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="GPU",
            help="A card (h200, mi300x, ...), sm_90, gfx942, cpu; several with commas, or all. Default: this machine.",
        ),
    ] = None,
    kernel: Annotated[str, typer.Option(help="flash_fwd, hopper/flash_fwd, ...: explain this one.")] = "auto",
    measured_us: Annotated[
        float | None, typer.Option(metavar="US", help="What the call took: split into losses from the bound up.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A record of bench: take the call's time from there.")
    ] = None,
    hot: Annotated[bool, typer.Option("--hot", help="The same tensors were used by the call before.")] = False,
    from_table: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Somebody's table of times (docs/workbench/diagnose.md): what its own numbers say."
        ),
    ] = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="What each resource of flash_fwd's loop costs; timed where there is a GPU.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which kernel serves a call, what binds it, how long it takes, and what to change.

    The call is described by its shapes and options; nothing is run. Printed are the least times by the card's data
    sheet and by what `roof` measured, with their arithmetic, the predicted time and where it is lost, the memory it
    takes, and why not another kernel.
    """
    if from_table is not None:
        _takes_no(context, "--from-table", _given(context) - {"from_table", "as_json"})
        from warpwave.workbench.diagnose.text import run

        say(run(from_table, as_json))
        return
    assert problem is not None  # call_options describes it wherever there is no table
    if ablate:
        _takes_no(context, "--ablate", _given(context) & {"kernel", "measured_us", "record", "hot"})
        _print_ablations(problem, gpu, as_json)
        return
    _print_explanation(problem, gpu, kernel, measured_us, record, hot, as_json)


def _given(context: typer.Context) -> set[str]:
    """Names of the options that the command line has."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _takes_no(context: typer.Context, option: str, others: set[str]) -> None:
    """Refuses options that would go unheard beside another."""
    if names := [parameter.opts[0] for parameter in context.command.params if parameter.name in others]:
        raise typer.BadParameter(f"{option} takes no {', '.join(names)}")


def _print_ablations(problem: AttentionProblem, name: str | None, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from warpwave.workbench.hardware.catalog import resolve
    from warpwave.workbench.model.ablation import ablate

    try:
        gpu = None if name is None else resolve(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from None
    found = ablate(problem, gpu)
    say(json.dumps(asdict(found), indent=2) if as_json else found)


def _print_explanation(
    problem: AttentionProblem,
    name: str | None,
    kernel: str,
    measured_us: float | None,
    record: Path | None,
    hot: bool,
    as_json: bool,
) -> None:
    import json

    import warpwave
    from warpwave.workbench.hardware.catalog import resolve

    if name is not None and ("," in name or name.lower() == "all"):
        from dataclasses import asdict

        from warpwave.workbench.explain import other_cards

        if measured_us is not None or record is not None:
            raise typer.BadParameter("a measured time is of one card; name that card alone", param_hint="--gpu")
        rows = other_cards.explain_on(problem, other_cards.cards(name), kernel=kernel, hot=hot)
        say(json.dumps([asdict(row) for row in rows], indent=2) if as_json else other_cards.text(problem, rows))
        return
    try:
        gpu = None if name is None else resolve(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from None
    explanation = warpwave.explain(problem, gpu=gpu, kernel=kernel, measured_us=measured_us, record=record, hot=hot)
    say(json.dumps(explanation.to_dict(), indent=2) if as_json else explanation)


@app.command()
def roof(
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the figures, JSON, to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine's ceilings: bandwidth, products, exponentials, launches.

    Half a minute on a GPU, ten seconds on a CPU. The figures are kept with their date, shown beside the card's data
    sheet, and `explain` uses them from then on.
    """
    from warpwave.workbench.hardware.ceilings_table import run

    raise typer.Exit(run(device, out, as_json))


@app.command(name="inspect")
@describes_a_call
def inspect_(
    problem: AttentionProblem,
    kernel: Annotated[
        str | None, typer.Argument(metavar="KERNEL", help="flash_fwd, tiled, hopper/flash_fwd, ...")
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(metavar="ARCH", help="Target: sm_90, gfx942, h200, ...; repeat for more. Default: this GPU."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONFIG", help="128x64x8x3 (every value), block_m=128,num_stages=3, or default; repeatable."
        ),
    ] = None,
    all_configs: Annotated[bool, typer.Option("--all-configs", help="Every config the kernel may choose.")] = False,
    diff: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Two configs, or two files that --json wrote.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the compiler's stages, SASS included, to this folder; over no others.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a kernel compiles to for a target. No GPU is needed.

    Registers, spills, shared memory, blocks a multiprocessor and the instruction mix. Exit code 1 if a config does not
    compile or does not fit.
    """
    from warpwave.workbench.inspect import command as inspection_command
    from warpwave.workbench.inspect.compiled import CannotCompile

    request = inspection_command.Request(kernel, arch or (), config or (), all_configs, diff, save, as_json)
    try:
        raise typer.Exit(inspection_command.run(problem, request))
    except CannotCompile as error:
        raise InvalidInput(str(error)) from None


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a file for a bug report; nothing secret is in it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --bundle write over an existing file.")] = False,
) -> None:
    """Say what this machine and installation can do, with a cure for each problem.

    Exit code 1 if there is a problem.
    """
    from warpwave.workbench.doctor.doctor import run

    raise typer.Exit(run(as_json=as_json, bundle=bundle, force=force))


@app.command()
def verify(
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the record goes. Default: a new file named by card and time."),
    ] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Check this kernel alone; repeat for more.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that attention is right on this machine, and as fast as recorded.

    Two minutes on a GPU. Exit code 1 if a result is wrong.
    """
    import torch

    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is not a device; use cpu or cuda", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU here; use --device cpu", param_hint="--device")
    from warpwave.workbench.verify.verify import run

    raise typer.Exit(run(device_name=device, out=out, kernels=kernel or (), as_json=as_json))


@app.command()
def bench(
    suite: Annotated[
        str | None, typer.Argument(help="Name of a suite in warpwave/workbench/bench/suites, or a path to one.")
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS", help="In place of a suite: let blocks, seqlen, head_dim or batch grow, and say why."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Append the records, JSON Lines, to this file.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times each contender takes its turn; 6 for intervals.")] = 9,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="auto, eager, graph or streams; repeat for more. Default: the suite's."),
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="Kernel of ours to measure; repeat for more. Default: the suite's.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Peer to measure, or none; repeat for more. Default: all there are.")
    ] = None,
    only: Annotated[str, typer.Option(metavar="TEXT", help="The cases alone that have this in their name.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Leave out the cases that --out holds already.")] = False,
    peer_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds a contender may take to get ready on a case; 0 for no limit.")
    ] = 120.0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records instead of tables.")] = False,
) -> None:
    """Time our kernels against their peers, each checked first.

    Ctrl-C and SIGTERM keep what is written; the same command with --resume goes on from there. Exit code 1 if a kernel
    of ours has no time on a case, now or in the part that --resume left out.
    """
    from warpwave.workbench.bench.run import main as run

    raise typer.Exit(
        run(
            suite,
            out=out,
            rounds=rounds,
            json_output=as_json,
            kernels=kernel or (),
            peers=peer or (),
            modes=mode or (),
            only=only,
            resume=resume,
            peer_timeout_s=peer_timeout or None,
            device=device,
            scale=scale,
        )
    )


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="Record file of bench, or FILE@COMMIT for part of one.")],
    b: Annotated[str | None, typer.Argument(metavar="[B]", help="The same. Default: A, for two contenders.")] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="Whom to compare; twice, the second in B with the first in A. Default: our kernels."),
    ] = None,
    margin: Annotated[float, typer.Option(help="How far from 1 a ratio may be and still count as the same.")] = 0.02,
    fail_on: Annotated[str, typer.Option(help="Exit code 1 if anything is: slower, unclear; or never.")] = "slower",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Hold one run against another: what is FASTER, SLOWER, the SAME, or UNCLEAR."""
    from warpwave.workbench.bench.comparison_text import main as run

    raise typer.Exit(run(a, b, contenders=contender or (), margin=margin, fail_on=fail_on, json_output=as_json))


@app.command()
def report(
    records: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RECORD]...", help="Files of bench, verify. Default: the H200's, shipped."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page. Default: report.html, or none with --markdown.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same facts as Markdown; - is standard output.")
    ] = None,
) -> None:
    """Write a record as one HTML file to read: verdicts, roofline, tables, environment.

    The file needs no network and no script. A file that is not a report, or was edited since, is never written over.
    """
    from warpwave.workbench.report.command import main as run

    raise typer.Exit(run(records or (), out=out, markdown_out=markdown))
