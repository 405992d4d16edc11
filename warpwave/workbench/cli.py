"""The `warpwave` command.

Only typer is imported before a command runs, because importing torch takes seconds. A mistake in the command line ends
with one sentence on stderr and exit code 2. A check that fails ends with exit code 1.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.workbench.call_options import describes_a_call
from warpwave.workbench.entry import is_required, what_to_install
from warpwave.workbench.terminal import OutputLost, complain, discard_output, prepare_streams, say

if TYPE_CHECKING:
    from warpwave.problem import AttentionProblem

app = typer.Typer(
    help="Exact attention on GPUs: explain, measure, verify and compare calls.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def command() -> NoReturn:
    """Runs `main` and ends the process without delay. It is the entry point of the console script."""
    gc.set_threshold(100_000)  # importing torch makes a million lasting objects; each collection of them takes 0.2 s
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = _exit_code(ended)
    _exit(code)


def main() -> None:
    """Runs the command with the arguments of `sys.argv`. Ends with SystemExit."""
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        # A reader that closes the pipe (`| head`) ends the command silently, like any other command.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        prepare_streams()
        app(prog_name="warpwave")
    except (InvalidInput, InvalidType, UnsupportedProblem) as error:
        complain(error)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if not is_required(error):
            raise
        complain(what_to_install(error))
        sys.exit(2)
    except OutputLost as lost:
        _give_up(str(lost))
    except OSError as error:
        if error.filename is not None:  # typer prints help and usage to streams, whose errors name no file
            raise
        _give_up(error.strerror or str(error))


def _give_up(why: str) -> NoReturn:
    """Ends a command whose output cannot be written."""
    complain(f"the output could not be written: {why}")
    discard_output()
    sys.exit(2)


def _exit_code(ended: SystemExit) -> int:
    """Returns the exit code. Like Python, it prints an argument that is not a number and returns 1."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    say(ended.code, to=sys.stderr)
    return 1


def _exit(code: int) -> NoReturn:
    """Ends the process like `sys.exit`, without tearing down torch's modules, which takes a third of a second."""
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
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the report, one HTML file, here.")] = Path(
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
            help="h200, mi300x, sm_90, gfx942 or cpu; several cards separated by commas (h200,l4); or all cards (all). "
            "Default: this machine.",
        ),
    ] = None,
    kernel: Annotated[str, typer.Option(help="Explain this kernel: flash_fwd, hopper/flash_fwd, ...")] = "auto",
    measured_us: Annotated[
        float | None, typer.Option(metavar="US", help="Measured time of the call; it is split into losses.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the call's time from this record of bench.")
    ] = None,
    passes: Annotated[
        str, typer.Option(help="Passes that the measured time covers: forward, backward or both (with --grad).")
    ] = "forward",
    hot: Annotated[bool, typer.Option("--hot", help="Assume that the previous call used the same tensors.")] = False,
    from_table: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Diagnose a table of times instead: Markdown, CSV, text or TOML; - is standard input. --gpu and the "
            "call's options state what the table does not (docs/workbench/diagnose.md).",
        ),
    ] = None,
    code: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FACT",
            help="With --from-table, a fact about the measured code: block_m=64, scores=memory, or flash.block_m=64 "
            "for one series; repeatable.",
        ),
    ] = None,
    ablate: Annotated[
        bool,
        typer.Option("--ablate", help="Show what each resource of flash_fwd's loop costs; timed if there is a GPU."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain which kernel serves a call, what bounds it, how long it takes, and what to change.

    Shapes and options describe the call; nothing is run. The output has the lower bounds by the card's data sheet and
    by the ceilings that `roof` measured, the predicted time and its losses, the memory, and the reason why each other
    kernel does not serve the call. Exit code 2 if the kernel of --kernel cannot run the call.
    """
    if from_table is not None:
        _diagnose(context, from_table, as_json)
        return
    if code:
        raise typer.BadParameter("facts about code belong to --from-table", param_hint="--code")
    assert problem is not None  # call_options describes it wherever there is no table
    if ablate:
        _takes_no(context, "--ablate", _given(context) & {"kernel", "measured_us", "record", "hot", "passes"})
        _print_ablations(problem, gpu, as_json)
        return
    _print_explanation(problem, gpu, kernel, measured_us, passes, record, hot, as_json)


# Options of a call -> the words of a table; a table has no others.
OF_TABLES = {
    "batch": "batch",
    "heads": "heads",
    "heads_kv": "heads_kv",
    "seqlen_q": "seqlen",
    "seqlen_k": "seqlen_k",
    "head_dim": "head_dim",
    "dtype": "dtype",
    "causal": "causal",
    "passes": "passes",
    "softcap": "softcap",
}


def _diagnose(context: typer.Context, name: str, as_json: bool) -> None:
    """Prints the diagnosis of a table; options add what the table does not state."""
    given = _given(context)
    _takes_no(context, "--from-table", given - {"from_table", "as_json", "gpu", "code", *OF_TABLES})
    from warpwave.workbench.call_options import DTYPES as OF_CALLS
    from warpwave.workbench.diagnose.parse import DTYPES, Given, TableError, facts_of_code
    from warpwave.workbench.diagnose.text import run

    call = {word: context.params[option] for option, word in OF_TABLES.items() if option in given}
    if "softcap" in call:
        call["softcap"] = call["softcap"] != 0
    if "dtype" in call:
        call["dtype"] = OF_CALLS.get(call["dtype"], call["dtype"])
        if call["dtype"] not in DTYPES:
            raise typer.BadParameter(
                f"{call['dtype']!r} is not a dtype of tables; use {', '.join(DTYPES)}", param_hint="--dtype"
            )
    try:
        facts = facts_of_code(context.params["code"] or [])
    except TableError as error:
        raise InvalidInput(str(error)) from None
    say(run(name, as_json, Given(gpu=context.params["gpu"], call=call, code=facts)))


def _given(context: typer.Context) -> set[str]:
    """Returns the names of the options that were given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _takes_no(context: typer.Context, option: str, others: set[str]) -> None:
    """Refuses options that another option makes meaningless."""
    if names := [parameter.opts[0] for parameter in context.command.params if parameter.name in others]:
        raise typer.BadParameter(f"{option} takes no {', '.join(names)}")


def _is_list(name: str) -> bool:
    """Returns whether a value of --gpu names several cards."""
    return "," in name or name.lower() == "all"


def _print_ablations(problem: AttentionProblem, name: str | None, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from warpwave.workbench.hardware.catalog import resolve
    from warpwave.workbench.model.ablation import ablate

    if name is not None and _is_list(name):
        raise typer.BadParameter("--ablate takes one GPU, not several", param_hint="--gpu")
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
    passes: str,
    record: Path | None,
    hot: bool,
    as_json: bool,
) -> None:
    import json

    import warpwave
    from warpwave.workbench.hardware.catalog import resolve

    if name is not None and _is_list(name):
        from dataclasses import asdict

        from warpwave.workbench.explain import other_cards

        if measured_us is not None or record is not None:
            raise typer.BadParameter("a measured time belongs to one card; name only that card", param_hint="--gpu")
        rows = other_cards.explain_on(problem, other_cards.cards(name), kernel=kernel, hot=hot)
        say(json.dumps([asdict(row) for row in rows], indent=2) if as_json else other_cards.text(problem, rows))
        return
    try:
        gpu = None if name is None else resolve(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from None
    measured: dict[str, Any] = {"measured_us": measured_us, "passes": passes, "record": record}
    explanation = warpwave.explain(problem, gpu=gpu, kernel=kernel, hot=hot, **measured)
    say(json.dumps(explanation.to_dict(), indent=2) if as_json else explanation)
    if explanation.kernel is None:  # the kernel was named, and the call would raise UnsupportedProblem
        complain(f"kernel {kernel!r} cannot run this call: {'; '.join(explanation.reasons[kernel])}")
        raise typer.Exit(2)


@app.command()
def roof(
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the ceilings to this file, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine's ceilings: memory bandwidth, products, exponentials, launches.

    This takes half a minute on a GPU and ten seconds on a CPU. The ceilings are stored with their date and shown beside
    the card's data sheet. `explain` uses them from then on.
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
        typer.Option(metavar="ARCH", help="Target: sm_90, gfx942, h200, ...; repeatable. Default: this GPU."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONFIG", help="128x64x8x3 (every value), block_m=128,num_stages=3, or default; repeatable."
        ),
    ] = None,
    all_configs: Annotated[
        bool, typer.Option("--all-configs", help="Inspect every config that the kernel may choose.")
    ] = False,
    diff: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Compare two configs, or two files written by --json.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the compiler's stages, including SASS, to this new folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile a kernel for a target and show what the compiler made of it. No GPU is needed.

    The output has registers, spills, shared memory, resident blocks per multiprocessor, and the instruction mix. Exit
    code 1 if a config does not compile or does not fit.
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
        Path | None, typer.Option(metavar="FILE", help="Also write a file for a bug report; it contains no secrets.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --bundle overwrite an existing file.")] = False,
) -> None:
    """Check this machine and installation, and suggest a fix for each problem.

    Exit code 1 if there is a problem.
    """
    if force and bundle is None:
        raise typer.BadParameter("only a bundle can overwrite a file; add --bundle", param_hint="--force")
    from warpwave.workbench.doctor.doctor import run

    raise typer.Exit(run(as_json=as_json, bundle=bundle, force=force))


@app.command()
def verify(
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the record here. Default: a new file named by card and time."),
    ] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Check only this kernel; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that attention is correct on this machine, and as fast as recorded.

    This takes two minutes on a GPU. Exit code 1 if a result is wrong.
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
    context: typer.Context,
    suite: Annotated[
        str | None,
        typer.Argument(help="Name of a suite (without one, bench lists them), path of a .toml file, or precision."),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS", help="Instead of a suite: scale blocks, seqlen, head_dim or batch, and explain the times."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Append the records to this file, as JSON Lines.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of timing; an interval needs at least 6.")] = 9,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="auto, eager, graph or streams; repeatable. Default: the suite's."),
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="Kernel of warpwave to measure; repeatable. Default: the suite's.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Peer to measure, or none; repeatable. Default: all available.")
    ] = None,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Measure only cases whose name contains this text.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Skip the cases that --out already holds.")] = False,
    peer_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that a contender may take to prepare a case; 0 means no limit.")
    ] = 120.0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records instead of tables.")] = False,
) -> None:
    """Time warpwave's kernels against their peers. Every result is checked first.

    Records that are written survive Ctrl-C and SIGTERM; the same command with --resume continues there. Exit code 1 if
    a kernel of warpwave has no time for a case, including the cases that --resume skipped.
    """
    if suite is None and scale is None:
        from warpwave.workbench.bench.workloads import suite_list

        say(suite_list())
        raise typer.Exit(2)
    if suite == "precision":
        from warpwave.workbench.bench.precision import main as compare_precision

        if _given(context) - {"suite", "out", "rounds", "only", "device", "as_json"}:
            raise typer.BadParameter("precision takes --out, --rounds, --only, --device and --json", param_hint="SUITE")
        raise typer.Exit(compare_precision(out=out, rounds=rounds, only=only, device=device, json_output=as_json))
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
    a: Annotated[str, typer.Argument(metavar="A", help="Record file of bench, or FILE@COMMIT for one commit of it.")],
    b: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Another one. Default: A, to compare two of its contenders.")
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="Contender to compare; the second, if given, is the one in B. Default: warpwave's kernels."),
    ] = None,
    margin: Annotated[float, typer.Option(help="Largest distance of a ratio from 1 that counts as SAME.")] = 0.02,
    fail_on: Annotated[str, typer.Option(help="Exit code 1 if any case is slower or unclear; or never.")] = "slower",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two runs: which cases are FASTER, SLOWER, the SAME, or UNCLEAR."""
    from warpwave.workbench.bench.comparison_text import main as run

    raise typer.Exit(run(a, b, contenders=contender or (), margin=margin, fail_on=fail_on, json_output=as_json))


@app.command()
def report(
    records: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RECORD]...",
            help="Record files of bench or verify. Default: the H200 records that come with warpwave.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page here. Default: report.html, or no page with --markdown."),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the same facts as Markdown here; - is standard output.")
    ] = None,
) -> None:
    """Write records as one HTML page: verdicts, roofline, tables, environment.

    The page needs no network and no script. A file that is not a report, or that was edited, is never overwritten.
    """
    from warpwave.workbench.report.command import main as run

    raise typer.Exit(run(records or (), out=out, markdown_out=markdown))
