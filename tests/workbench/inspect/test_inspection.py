"""What `inspect` says: groups, configs, occupancy and differences here; the compiler and the command in processes of
their own, for Triton's interpreter, which the suite needs without a GPU, replaces the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.marks import needs_triton
from warpwave.errors import InvalidInput
from warpwave.gpu import ARCHS, Gpu
from warpwave.kernels import eager, flash_fwd
from warpwave.workbench import cli
from warpwave.workbench.hardware.occupancy import MULTIPROCESSORS, occupancy
from warpwave.workbench.inspect import command as inspection_command
from warpwave.workbench.inspect import compiled, inspection
from warpwave.workbench.inspect import text as inspection_text
from warpwave.workbench.inspect.compiled import CannotCompile, CompileFacts
from warpwave.workbench.inspect.inspection import Finding, Inspection

DEFAULT = flash_fwd.Config(64, 64, 4, 3)

FACTS = CompileFacts("flash_fwd_kernel", "sm_90", 168, 0, 0, 57_344, 4, Counter({"HGMMA": 8, "IMAD": 100}), 0.5, False)
FINDING = Finding(
    "flash_fwd",
    "sm_90",
    {"block_m": 64, "block_n": 64},
    True,
    232_448,
    255,
    FACTS,
    occupancy(Gpu.for_arch("sm_90"), registers=168, accumulators=0, num_warps=4, smem_bytes=57_344),
    {"matrix": 8, "other": 100},
)


class _CompilerError(Exception):
    """Like Triton's: the text is an excerpt of the source, followed by the message if there is one."""

    def __init__(self, message: str | None) -> None:
        super().__init__(f"at 165:21:\n    scores = product(q, k)\n             ^\n{message or ''}")
        self.error_message = message


def test_the_reason_of_a_compiler_error_is_that_of_the_innermost_function() -> None:
    assert inspection.reason_of(_CompilerError("numel exceeds \x1b")) == "numel exceeds \\x1b"
    assert inspection.reason_of(ValueError("one\ntwo")) == "one" and inspection.reason_of(ValueError()) == ""
    try:
        try:
            raise _CompilerError("numel exceeds")
        except _CompilerError as inner:
            raise _CompilerError(None) from inner
    except _CompilerError as outer:
        assert inspection.reason_of(outer) == "numel exceeds"


# Groups ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "opcode"),
    [
        (group, opcode)
        for group, opcodes in {
            "matrix": "HMMA HGMMA UTCHMMA v_mfma_f32_32x32x8_bf16 v_wmma_f32_16x16x16_bf16",
            "exponentials": "MUFU.EX2 v_exp_f32_e32",
            "other special functions": "MUFU.RCP MUFU.LG2 v_rcp_f32_e32 v_log_f32",
            "FMA": "FFMA FFMA2 v_fma_f32 v_fmac_f32_e32 v_dual_fmac_f32 v_pk_fma_f32",
            "add, multiply, maximum": "FADD FMNMX3 FSEL v_max3_f32 v_cmp_o_f32_e32 v_pk_mul_f32 v_dual_mul_f32",
            "conversions": "F2FP I2F v_cvt_f32_u32_e32",
            "TMA": "UTMALDG UTMASTG UBLKCP",
            "barriers and waits": "BAR LDGDEPBAR DEPBAR SYNCS s_waitcnt s_barrier",
            "copies global to shared": "LDGSTS",
            "global loads": "LDG global_load_dwordx4 buffer_load_dwordx4",
            "global stores": "STG global_store_b16",
            "shared loads": "LDS LDSM ds_read2_b64 ds_load_b128",
            "shared stores": "STS STSM ds_write_b64 ds_store_b128",
            "spills": "LDL STL scratch_load_b32",
            "other": "IMAD LDC LDCU v_cmp_gt_i32_e32 v_mad_u64_u32 v_add_u32_e32 PRMT",
        }.items()
        for opcode in opcodes.split()
    ],
)
def test_each_instruction_has_its_group(expected: str, opcode: str) -> None:
    assert inspection.group(Counter({opcode: 3})) == {expected: 3}


# Configs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("128x64x8x2", flash_fwd.Config(128, 64, 8, 2)),
        ("128x64x8x2x1", flash_fwd.Config(128, 64, 8, 2, split_ahead=True)),
        ("num_stages=1", flash_fwd.Config(64, 64, 4, 1)),
        ("block_m=128,num_warps=8", flash_fwd.Config(128, 64, 8, 3)),
    ],
)
def test_a_config_is_read(text: str, expected: flash_fwd.Config) -> None:
    assert inspection.parse_config(text, DEFAULT) == expected
    assert inspection.parse_config(inspection.config_name(vars(expected)), DEFAULT) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("128x64", "has 2 values.* has 4 to 5; its fields are block_m, block_n, num_warps, num_stages, split_ahead"),
        ("1x2x3x4x5x6", "has 6 values.* has 4 to 5"),
        ("block=64", "did you mean block_"),
        ("zzz=64", "its fields are"),
        ("num_stages=two", "'two' is not a whole number"),
        ("100x64x4x3", "block_m is 100; it must be a power of two"),
    ],
)
def test_a_wrong_config_is_said(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        inspection.parse_config(text, DEFAULT)


# Occupancy ------------------------------------------------------------------------------------------------------------


def test_every_architecture_has_a_multiprocessor() -> None:
    assert set(MULTIPROCESSORS) == set(ARCHS)


@pytest.mark.parametrize(
    ("arch", "registers", "warps", "smem", "blocks", "limit"),
    [
        # NVIDIA's occupancy calculator, by hand: 65,536 registers, 168 rounded to 168, 12 warps of 32 lanes.
        ("sm_90", 168, 4, 0, 3, "registers"),
        ("sm_90", 169, 4, 0, 2, "registers"),  # 176 a lane: 11 warps, of which 4 make a block
        ("sm_90", 255, 8, 0, 1, "registers"),
        ("sm_90", 32, 4, 0, 16, "registers"),
        ("sm_90", 16, 4, 113 * 1024, 2, "shared memory"),
        ("sm_90", 16, 4, 114 * 1024, 1, "shared memory"),  # each block costs one KiB more
        ("sm_86", 16, 4, 0, 12, "warps"),
        ("sm_90", 16, 1, 0, 32, "blocks"),
        ("sm_90", 128, 4, 228 * 1024, 0, "shared memory"),  # more than one block may have
        ("gfx942", 231, 4, 0, 2, "registers"),  # 232 of 512
        ("gfx942", 64, 4, 40_960, 1, "shared memory"),
        ("gfx1100", 204, 8, 0, 3, "registers"),  # 7 waves on each of four SIMDs
    ],
)
def test_occupancy(arch: str, registers: int, warps: int, smem: int, blocks: int, limit: str) -> None:
    found = occupancy(Gpu.for_arch(arch), registers=registers, accumulators=0, num_warps=warps, smem_bytes=smem)
    assert found is not None
    assert (found.blocks, found.limit) == (blocks, limit)


def test_accumulators_count_where_they_have_a_file_of_their_own() -> None:
    few, many = (
        occupancy(Gpu.for_arch("gfx908"), registers=64, accumulators=n, num_warps=4, smem_bytes=0) for n in (32, 128)
    )
    assert few is not None
    assert many is not None
    assert (few.blocks, many.blocks) == (4, 2)


def test_an_unknown_multiprocessor_is_no_guess() -> None:
    gpu = replace(Gpu.for_arch("sm_90"), arch="sm_999")
    assert occupancy(gpu, registers=64, accumulators=0, num_warps=4, smem_bytes=0) is None


# Differences and files ------------------------------------------------------------------------------------------------


def test_an_inspection_survives_its_file() -> None:
    whole = Inspection(
        "a call", "0.1", {"sm_90": {"triton": "3.7.1"}}, (FINDING, replace(FINDING, facts=None, error="no"))
    )
    assert Inspection.from_json(whole.to_json()) == whole


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "inspection"}', '{"kind": "other", "schema_version": 1}'])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"missing|Expecting|it must be"):
        Inspection.from_json(text)


def test_a_difference_names_what_moved_and_nothing_else() -> None:
    changed = replace(FACTS, registers=200, instructions=Counter({"HGMMA": 8, "IMAD": 90, "STL": 4}))
    other = replace(FINDING, facts=changed, groups=inspection.group(changed.instructions))
    (difference,) = inspection_text.compare([FINDING], [other])
    assert difference.changed == {
        "registers": (168, 200),
        "instructions": (108, 102),
        "other": (100, 90),
        "spills": (0, 4),
    }
    assert difference.opcodes == {"IMAD": (100, 90), "STL": (0, 4)}
    text = inspection_text.describe_difference(difference)
    assert "168 -> 200  (+32)" in text
    assert "HGMMA" not in text
    (same,) = inspection_text.compare([FINDING], [FINDING])
    assert inspection_text.describe_difference(same).endswith("no difference")


def test_what_is_on_one_side_only_is_said() -> None:
    other = replace(FINDING, arch="sm_80")
    found = inspection_text.compare([FINDING, other], [FINDING])
    assert [d.after is None for d in found] == [False, True]
    assert "only in the first" in inspection_text.describe_difference(found[1])


def test_shared_memory_that_does_not_fit_is_said_loudly() -> None:
    big = replace(FINDING, facts=replace(FACTS, smem_bytes=300_000))
    assert not big.fits
    assert "DOES NOT FIT" in inspection_text.describe(big)
    assert "does not fit" in inspection_text.table([big]).rows[0][3]


def test_several_launches_are_no_better_than_their_worst() -> None:
    second = replace(FACTS, name="b", registers=20, spill_bytes=8, compile_s=0.25)
    both = compiled.worst([FACTS, second])
    assert (both.registers, both.spill_bytes, both.instructions["IMAD"], both.compile_s) == (168, 8, 200, 0.75)
    assert both.name == "flash_fwd_kernel, b"


def test_a_kernel_of_torchs_operations_has_nothing_to_compile() -> None:
    with pytest.raises(CannotCompile, match="torch's operations"):
        inspection_command._kernel(eager.NAME)
    with pytest.raises(InvalidInput, match="did you mean flash_fwd"):
        inspection_command._kernel("flash_fdw")


# The command ----------------------------------------------------------------------------------------------------------


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "warpwave", "inspect", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=inherited | variables,
    )


@needs_triton
def test_the_command_compiles_writes_and_compares(tmp_path: Path) -> None:
    """Two configs on an NVIDIA and an AMD target, as JSON and with the stages; then the file against itself."""
    stages = tmp_path / "stages"
    arguments = [
        "flash_fwd",
        "--arch",
        "sm_90",
        "--arch",
        "gfx942",
        "--head-dim",
        "64",
        "--json",
        "--save",
        str(stages),
    ]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["tools"]["sm_90"]["triton"]
    assert data["tools"]["sm_90"]["ptxas"]
    nvidia, amd = data["findings"]
    assert nvidia["groups"]["matrix"] > 0
    assert nvidia["facts"]["spill_bytes"] == 0
    assert amd["groups"]["matrix"] > 0
    assert {path.suffix for path in stages.iterdir()} == {".ttir", ".ttgir", ".llir", ".ptx", ".sass", ".amdgcn"}
    assert "HGMMA" in next(stages.glob("*.sass")).read_text()

    theirs = next(stages.glob("*.ttgir"))
    assert run(*arguments).returncode == 0, "the same text again is no loss"
    theirs.write_text("notes\n")
    refused = run(*arguments)
    assert refused.returncode == 2
    assert f"{theirs.name} already exists and is not a ttgir of the same text; name another file" in refused.stderr
    assert theirs.read_text() == "notes\n"

    file = tmp_path / "a.json"
    file.write_text(done.stdout)
    same = run("--diff", str(file), str(file))
    assert same.returncode == 0, same.stderr
    assert same.stdout.count("no difference") == 2
    broken = tmp_path / "b.json"
    broken.write_text("{}")
    wrong = run("--diff", str(file), str(broken))
    assert wrong.returncode == 2
    assert "no file of `warpwave inspect --json`" in wrong.stderr


@needs_triton
def test_the_forward_of_a_call_with_gradients_is_compiled() -> None:
    """The kernel itself refuses gradients, which flash_bwd computes."""
    done = run("flash_fwd", "--arch", "sm_90", "--seqlen-q", "16", "--head-dim", "16", "--grad", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["findings"]
    assert found["groups"]["matrix"] > 0
    refused = run("flash_fwd", "--arch", "sm_90", "--head-dim", "300", "--grad")
    assert refused.returncode == 2 and "head_dim is 300" in refused.stderr


@needs_triton
def test_two_configs_are_set_side_by_side() -> None:
    done = run("flash_fwd", "--arch", "sm_90", "--head-dim", "64", "--diff", "default", "num_stages=1")
    assert done.returncode == 0, done.stderr
    assert "shared memory bytes" in done.stdout
    assert "64x64x4x3" in done.stdout
    assert "64x64x4x1" in done.stdout


@needs_triton
def test_what_does_not_fit_is_exit_code_1() -> None:
    done = run("flash_fwd", "--arch", "sm_86", "--head-dim", "256", "--config", "64x64x4x3")
    assert done.returncode == 1, done.stderr
    assert "DOES NOT FIT" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense", "--arch", "sm_90"], "no kernel is called 'nonsense'"),
        (["eager", "--arch", "sm_90"], "torch's operations"),
        (["flash_fwd", "--arch", "sm_12"], "sm_12"),
        (["flash_fwd", "--arch", "cpu"], "nothing is compiled for a CPU"),
        (["flash_fwd", "--arch", "sm_90", "--config", "64"], "its fields are"),
        (["flash_fwd", "--arch", "sm_90", "--head-dim", "512"], "head_dim is 512"),
        (["flash_fwd", "--arch", "sm_90", "--all-configs", "--config", "default"], "not both"),
        (["--arch", "sm_90"], "name a kernel"),
        (["--diff", "no.json", "neither.json"], "there is no file no.json"),
        (["flash_fwd", "--arch", "sm_90", "--diff", "default", "default"], "nothing to compare"),
        (["flash_fwd", "--arch", "sm_90", "--diff", "default"], "--diff"),
        (
            ["flash_fwd", "--arch", "sm_90", "--diff", "default", "num_stages=1", "--config", "default"],
            "give --diff, which names both configs, or --config, not both",
        ),
        (["flash_fwd", "--diff", __file__, __file__], "--diff of two files compiles nothing; give it no kernel"),
        (["--config", "default", "--diff", __file__, __file__], "--diff of two files compiles nothing"),
        (["flash_fwd", "--arch", "sm_90", "--save", __file__], "--save: "),
        (["flash_fwd", "--arch", "sm_90", "--config", "block_m=64,block_m=128"], "block_m is given twice"),
        (["flash_fwd", "--arch", "sm_90", "--config", "num_stages=100000"], "it can be 32 at most"),
        (["flash_fwd", "--arch", "sm_90", "--config", "block_n=1048576"], "it can be 4,096 at most"),
        (["flash_fwd", "--arch", "sm_90", "--config", "2048x512x8x2"], "block_m * block_n is 1,048,576"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["warpwave", "inspect", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert said in printed.err
    assert printed.out == ""


def test_the_interpreter_is_named_as_what_stands_in_the_way() -> None:
    done = run("flash_fwd", "--arch", "sm_90", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "unset it to compile" in done.stderr or "Triton is not installed" in done.stderr
    assert "Traceback" not in done.stderr
