"""Bad input: every row of the contract's table is refused with the documented type, before anything is launched.

The checks must not be assertions of the package: the last test runs all others again under `python -O`.
"""

from __future__ import annotations

import contextlib
import fractions
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.harness import DEVICE, KERNELS, ON_GPU, each_kernel
from tests.conformance.test_poison import Guards
from warpwave import InvalidInput, InvalidType, UnsupportedProblem, attention, attention_varlen, plans
from warpwave.runtime.bounded import Bounded

ROOT = Path(__file__).parents[2]


def dense(**changes: Any) -> dict[str, Any]:
    """Arguments of a good dense call, with changes."""
    q = torch.ones(2, 5, 4, 16, dtype=torch.float16, device=DEVICE)
    return {"q": q, "k": q.new_ones(2, 7, 2, 16), "v": q.new_ones(2, 7, 2, 16)} | changes


def packed(**changes: Any) -> dict[str, Any]:
    """Arguments of a good packed call of three sequences, with changes."""
    q = torch.ones(10, 4, 16, dtype=torch.float16, device=DEVICE)
    arguments = {"q": q, "k": q.new_ones(12, 2, 16), "v": q.new_ones(12, 2, 16)}
    arguments |= {"cu_seqlens_q": offsets(0, 3, 3, 10), "cu_seqlens_k": offsets(0, 5, 9, 12)}
    return arguments | {"max_seqlen_q": 7, "max_seqlen_k": 5} | changes


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def ones(*shape: int, dtype: torch.dtype = torch.float16, device: torch.device = DEVICE) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def call(arguments: dict[str, Any]) -> None:
    tensors = [arguments.pop(name) for name in "qkv"]
    door: Callable[..., Any] = attention_varlen if "cu_seqlens_q" in arguments else attention
    door(*tensors, **arguments)


Row = tuple[str, Callable[[], dict[str, Any]], list[str]]

# Each row: a name, the arguments, and words its message must hold: the argument, what it was, what it must be.
WRONG_TYPE: list[Row] = [
    ("q is a list", lambda: dense(q=[1.0]), ["q", "list", "torch.Tensor"]),
    ("k is None", lambda: dense(k=None), ["k", "NoneType", "torch.Tensor"]),
    ("integer q", lambda: dense(q=ones(2, 5, 4, 16, dtype=torch.int32)), ["q", "torch.int32", "torch.float16"]),
    ("complex q", lambda: dense(q=ones(2, 5, 4, 16, dtype=torch.complex64)), ["q", "complex64", "torch.float64"]),
    ("double q alone", lambda: dense(q=ones(2, 5, 4, 16, dtype=torch.float64)), ["k", "torch.float64", "float16"]),
    ("k of another dtype", lambda: dense(k=ones(2, 7, 2, 16, dtype=torch.bfloat16)), ["k", "bfloat16", "float16"]),
    ("v of another dtype", lambda: dense(v=ones(2, 7, 2, 16, dtype=torch.float32)), ["v", "float32", "float16"]),
    ("integer mask", lambda: dense(mask=ones(2, 4, 5, 7, dtype=torch.uint8)), ["mask", "uint8", "bool"]),
    ("additive mask", lambda: dense(mask=ones(2, 4, 5, 7)), ["mask", "float16", "bool", "bias="]),
    ("boolean bias", lambda: dense(bias=ones(2, 4, 5, 7, dtype=torch.bool)), ["bias", "float16", "float32", "mask="]),
    ("bias of the third dtype", lambda: dense(bias=ones(2, 4, 5, 7, dtype=torch.bfloat16)), ["bias", "bfloat16"]),
    ("half slopes", lambda: dense(alibi_slopes=ones(4)), ["alibi_slopes", "float16", "float32"]),
    ("sinks of a third dtype", lambda: dense(sinks=ones(4, dtype=torch.bfloat16)), ["sinks", "bfloat16", "float32"]),
    ("long offsets", lambda: packed(cu_seqlens_q=offsets(0, 3, 3, 10).long()), ["cu_seqlens_q", "int64", "int32"]),
    ("float offsets", lambda: packed(cu_seqlens_k=offsets(0, 5, 9, 12).float()), ["cu_seqlens_k", "int32"]),
    ("offsets are None", lambda: packed(cu_seqlens_k=None), ["cu_seqlens_k", "None", "int32"]),
    ("causal is a word", lambda: dense(causal="bottom_right"), ["causal", "'bottom_right'", "Causal"]),
    ("kernel is a list", lambda: dense(kernel=["eager"]), ["kernel", "list", "str"]),
    ("checked is a word", lambda: dense(checked="x"), ["checked", "'x'", "True or False"]),
    ("checked is None", lambda: dense(checked=None), ["checked is None", "True or False"]),
    ("checked is 0", lambda: packed(checked=0), ["checked is 0", "True or False"]),
    ("window is a number", lambda: dense(window_size=5), ["window_size", "5", "left, right"]),
    ("window of floats", lambda: dense(window_size=(1.0, 2)), ["window_size", "1.0", "integer"]),
    ("window of bools", lambda: dense(window_size=(True, 2)), ["window_size", "True", "integer"]),
    ("sparse q", lambda: dense(q=ones(2, 5, 4, 16).to_sparse()), ["q is a sparse_coo tensor", "strided"]),
    ("scale in words", lambda: dense(softmax_scale="0.125"), ["softmax_scale", "'0.125'", "number"]),
    (
        "scale is a parameter",
        lambda: dense(softmax_scale=torch.nn.Parameter(ones())),
        ["softmax_scale", "Parameter", "q"],
    ),
    ("scale is a list", lambda: dense(softmax_scale=[1.0]), ["softmax_scale", "[1.0]", "number"]),
    ("softcap is a bool", lambda: dense(softcap=True), ["softcap", "True", "number"]),
    ("longest sequence is a float", lambda: packed(max_seqlen_q=7.0), ["max_seqlen_q", "7.0", "integer"]),
    ("longest sequence is None", lambda: packed(max_seqlen_k=None), ["max_seqlen_k", "None", "integer"]),
    ("longest sequence is a tensor", lambda: packed(max_seqlen_k=offsets(5)[0]), ["max_seqlen_k", "Tensor", "integer"]),
    ("return_lse is a number", lambda: dense(return_lse=1), ["return_lse", "1", "True or False"]),
    (
        "config of another kernel",
        lambda: dense(kernel="eager", config=KERNELS["flash_fwd"].Config(16, 16, 4, 1)),
        ["config", "flash_fwd", "eager.Config"],
    ),
    ("config of nobody", lambda: dense(kernel="eager", config=3), ["config", "int", "eager"]),
]
WRONG_VALUE: list[Row] = [
    ("q of rank 3", lambda: dense(q=ones(5, 4, 16)), ["q", "(5, 4, 16)", "batch", "head_dim"]),
    ("packed q of rank 4", lambda: packed(q=ones(1, 10, 4, 16)), ["q", "(1, 10, 4, 16)", "total_q"]),
    ("k of another batch", lambda: dense(k=ones(3, 7, 2, 16)), ["k", "(3, 7, 2, 16)", "batch", "2"]),
    ("k of another head_dim", lambda: dense(k=ones(2, 7, 2, 24)), ["k", "(2, 7, 2, 24)", "head_dim", "16"]),
    ("v shorter than k", lambda: dense(v=ones(2, 6, 2, 16)), ["v", "(2, 6, 2, 16)", "seqlen_k", "7"]),
    ("v of other heads", lambda: dense(v=ones(2, 7, 4, 16)), ["v", "num_heads_kv", "2"]),
    ("packed v shorter than k", lambda: packed(v=ones(11, 2, 16)), ["v", "total_k", "12"]),
    ("heads that do not divide", lambda: dense(k=ones(2, 7, 3, 16), v=ones(2, 7, 3, 16)), ["3 heads", "4 heads"]),
    ("no query head", lambda: dense(q=ones(2, 5, 0, 16)), ["q", "0 heads"]),
    ("no kv head", lambda: dense(k=ones(2, 7, 0, 16), v=ones(2, 7, 0, 16)), ["k", "0 heads"]),
    ("head_dim 0", lambda: dense(q=ones(2, 5, 4, 0), k=ones(2, 7, 2, 0)), ["q", "head_dim 0"]),
    ("mask that does not broadcast", lambda: dense(mask=ones(2, 4, 5, 6, dtype=torch.bool)), ["mask", "seqlen_k", "7"]),
    ("mask of rank 2", lambda: dense(mask=ones(5, 7, dtype=torch.bool)), ["mask", "(5, 7)", "num_heads_q"]),
    ("bias of kv heads", lambda: dense(bias=ones(2, 2, 5, 7)), ["bias", "num_heads_q", "4"]),
    ("slopes of kv heads", lambda: dense(alibi_slopes=ones(2, dtype=torch.float32)), ["alibi_slopes", "num_heads_q"]),
    ("sinks of kv heads", lambda: dense(sinks=ones(2, dtype=torch.float32)), ["sinks", "num_heads_q", "4"]),
    ("too few offsets of k", lambda: packed(cu_seqlens_k=offsets(0, 5, 12)), ["cu_seqlens_k", "batch+1", "4"]),
    ("offsets of rank 2", lambda: packed(cu_seqlens_q=offsets(0, 10)[None]), ["cu_seqlens_q", "(1, 2)"]),
    ("no offsets at all", lambda: packed(cu_seqlens_q=offsets(), cu_seqlens_k=offsets()), ["cu_seqlens_q", "empty"]),
    ("negative longest sequence", lambda: packed(max_seqlen_q=-1), ["max_seqlen_q", "-1"]),
    ("negative scale of no size", lambda: dense(softmax_scale=float("-inf")), ["softmax_scale", "-inf", "finite"]),
    ("scale NaN", lambda: dense(softmax_scale=float("nan")), ["softmax_scale", "nan", "finite"]),
    ("scale infinite", lambda: dense(softmax_scale=float("inf")), ["softmax_scale", "inf", "finite"]),
    ("scale beyond float32", lambda: dense(softmax_scale=1e300), ["softmax_scale", "1e+300", "finite"]),
    ("scale beyond float64", lambda: dense(softmax_scale=-(10**400)), ["softmax_scale", "range of a float"]),
    ("probability beyond float64", lambda: dense(dropout_p=10**400), ["dropout_p", "range of a float"]),
    ("negative softcap", lambda: dense(softcap=-1.0), ["softcap", "-1.0", "not negative"]),
    ("softcap NaN", lambda: dense(softcap=float("nan")), ["softcap", "nan", "finite"]),
    ("window of 70 bits", lambda: dense(window_size=(2**70, 0)), ["window_size", "64 bits"]),
    ("window below -1", lambda: dense(window_size=(-2, 0)), ["window_size", "-2", "-1"]),
    ("window below -1 on the right", lambda: packed(window_size=(0, -3)), ["window_size", "-3", "-1"]),
    ("unknown precision", lambda: dense(precision="tf16"), ["precision", "'tf16'", "tf32x3"]),
    ("unknown kernel", lambda: dense(kernel="flash"), ["kernel", "'flash'", "flash_fwd"]),
    (
        "config without kernel",
        lambda: dense(config=KERNELS["eager"].Config(16, 16)),
        ["config", "auto", "name the kernel"],
    ),
    ("tensors on two devices", lambda: dense(k=ones(2, 7, 2, 16, device=torch.device("meta"))), ["k", "meta", "q"]),
]
# Contents of cu_seqlens, which only checked=True looks at.
WRONG_CONTENTS: list[Row] = [
    ("first not 0", lambda: packed(cu_seqlens_q=offsets(1, 3, 3, 10)), ["cu_seqlens_q[0]", "1", "0"]),
    ("decreasing", lambda: packed(cu_seqlens_q=offsets(0, 5, 3, 10)), ["cu_seqlens_q[2]", "3", "5"]),
    ("queries beyond the last", lambda: packed(cu_seqlens_q=offsets(0, 3, 7, 12)), ["cu_seqlens_q[3]", "12", "10"]),
    ("last above the total", lambda: packed(cu_seqlens_k=offsets(0, 5, 9, 13)), ["cu_seqlens_k[3]", "13", "12"]),
    ("last below the total", lambda: packed(cu_seqlens_k=offsets(0, 5, 9, 11)), ["cu_seqlens_k[3]", "11", "12"]),
    ("longest too small", lambda: packed(max_seqlen_q=6), ["sequence 2", "7 tokens", "max_seqlen_q = 6"]),
    ("longest key sequence too small", lambda: packed(max_seqlen_k=4), ["sequence 0", "5 tokens", "max_seqlen_k = 4"]),
]


def rows(table: list[Row]) -> Any:
    return pytest.mark.parametrize(("arguments", "words"), [row[1:] for row in table], ids=[row[0] for row in table])


def refused(
    error: type[Exception],
    arguments: dict[str, Any],
    words: list[str],
    mp: pytest.MonkeyPatch,
    call: Callable[[dict[str, Any]], Any] = call,
) -> None:
    """The call raises this error and these words, and no kernel is bound on the way."""
    for module in KERNELS.values():
        mp.setattr(module, "bind", lambda *_: pytest.fail("a kernel was bound for a bad call"))
    with pytest.raises(error) as caught:
        call(arguments)
    missing = [word for word in words if word not in str(caught.value)]
    if missing:
        pytest.fail(f"{missing} not in {str(caught.value)!r}")


@rows(WRONG_TYPE)
def test_wrong_type(arguments: Any, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    refused(InvalidType, arguments(), words, monkeypatch)


@rows(WRONG_VALUE)
def test_wrong_value(arguments: Any, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    refused(InvalidInput, arguments(), words, monkeypatch)


@rows(WRONG_CONTENTS)
def test_wrong_contents_when_checked(arguments: Any, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    refused(InvalidInput, arguments() | {"checked": True}, words, monkeypatch)


def test_a_good_call_is_not_refused() -> None:
    """What every row above changes."""
    call(dense())
    call(packed(checked=True))


SPELLINGS: list[tuple[str, Any, Any]] = [
    ("softmax_scale", 0.25, [fractions.Fraction(1, 4), np.float32(0.25), np.float64(0.25)]),
    ("softcap", 1.0, [1, np.int64(1), np.float32(1.0), fractions.Fraction(1)]),
    ("window_size", (3, 0), [[3, 0], (np.int64(3), np.int32(0))]),
    ("max_seqlen_q", 7, [np.int64(7), np.int32(7)]),
    ("return_lse", True, [np.bool_(True)]),
]


@each_kernel
@pytest.mark.parametrize("first", ["usual", "unusual"])
@pytest.mark.parametrize(("name", "usual", "others"), SPELLINGS, ids=[row[0] for row in SPELLINGS])
def test_equal_numbers_of_other_types_are_one_call(
    name: str, usual: Any, others: Any, first: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever comes first, all are served alike: a plan is found by equality."""
    monkeypatch.setattr(plans, "_plans", Bounded(64))
    monkeypatch.setattr(plans, "_classes", Bounded(64))
    monkeypatch.setattr(plans, "_last", Bounded(64))
    make = packed if name == "max_seqlen_q" else dense
    spellings = [usual, *others] if first == "usual" else [*others, usual]
    for value in spellings:
        with contextlib.suppress(UnsupportedProblem):
            call(make(**{"return_lse": kernel != "torch_sdpa", name: value}) | {"kernel": kernel})


def test_what_a_call_says_has_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan is found by holds floats, ints and bools of Python, however they were given."""
    seen: list[Any] = []

    class Seen(Exception):
        pass

    def recall(operands: Any, said: Any, longest: Any = (), out: Any = None) -> Any:
        seen.append((*said, *longest))
        raise Seen

    monkeypatch.setattr(plans, "recall", recall)
    for given in (
        dense(softcap=np.float32(1), softmax_scale=fractions.Fraction(1, 4), window_size=[np.int64(3), 0]),
        packed(max_seqlen_q=np.int64(7), return_lse=np.bool_(True)),
    ):
        with contextlib.suppress(Seen):
            call(given)
    wrong = [x for said in seen for x in (*said[2:4], *(said[1] or ())) if type(x) not in (float, int, type(None))]
    if wrong or type(seen[0][2]) is not float or type(seen[0][3]) is not float or type(seen[1][-2]) is not int:
        pytest.fail(f"{wrong} in {seen}: each must be a float or an int of Python")


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (dense(softcap=1.0), {"softcap": True}),
        (dense(return_lse=True), {"return_lse": 1}),
        (packed(), {"max_seqlen_q": 7.0}),
        (dense(window_size=(1, 0)), {"window_size": (True, False)}),
        (dense(causal=True), {"causal": 1}),
    ],
    ids=str,
)
def test_a_known_call_forgives_no_type(good: dict[str, Any], bad: dict[str, Any]) -> None:
    for _ in range(2):
        call(dict(good))
    with pytest.raises(InvalidType, match=next(iter(bad))):
        call(good | bad)
    call(dict(good))


def test_errors_are_the_ones_python_users_catch() -> None:
    if not (issubclass(InvalidType, TypeError) and issubclass(InvalidInput, ValueError)):
        pytest.fail("InvalidType must be a TypeError and InvalidInput a ValueError")
    if not issubclass(UnsupportedProblem, NotImplementedError):
        pytest.fail("UnsupportedProblem must be a NotImplementedError")


def test_a_refusal_lists_every_reason_and_what_would_run() -> None:
    q = ones(1, 4, 1, 320)
    with pytest.raises(UnsupportedProblem) as refusal:
        attention(q, q, q.requires_grad_(), softcap=5.0, kernel="flash_fwd")
    message = str(refusal.value)
    reasons = refusal.value.reasons["flash_fwd"]
    missing = [
        w for w in (*reasons, "head_dim is 320", "head_dim_v is 320", "gradients", "three_kernel") if w not in message
    ]
    if missing or len(reasons) < 3:
        pytest.fail(f"{missing} not in {message!r}")


def test_an_unknown_argument_is_an_error() -> None:
    with pytest.raises(TypeError, match="is_causal"):
        attention(**dense(), is_causal=True)  # type: ignore[call-arg]


@each_kernel
@pytest.mark.parametrize("row", [row[0] for row in WRONG_CONTENTS] + ["far away", "negative"])
def test_wrong_contents_unchecked_stay_inside_the_tensors(
    row: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are unspecified; nothing outside the outputs is written, and the call returns."""
    far = {
        "far away": packed(cu_seqlens_q=offsets(0, 2**30, 3, 2**31 - 1), cu_seqlens_k=offsets(2**30, 5, -9, 2**31 - 1)),
        "negative": packed(cu_seqlens_q=offsets(-(2**31), -5, 3, -1), cu_seqlens_k=offsets(-7, -(2**30), 9, 0)),
    }
    arguments = far[row] if row in far else {name: make for name, make, _ in WRONG_CONTENTS}[row]()
    guards = Guards()
    guards.watch(monkeypatch)
    arguments = {n: guards.place(x) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    with contextlib.suppress(UnsupportedProblem):  # of a kernel without packed calls, held to its words elsewhere
        call(arguments | {"kernel": kernel})
    if ON_GPU:
        torch.cuda.synchronize()
    guards.assert_intact()


ODD_OFFSETS = (-(2**31), -(2**31) + 1, -1, 0, 1, 2, 9, 10, 11, 12, 13, 64, 2**16, 2**31 - 2, 2**31 - 1)


@each_kernel
def test_any_numbers_as_offsets_stay_inside_the_tensors(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets drawn from all 32-bit numbers, among them the ends, where a difference of two wraps."""
    rng = random.Random(kernel)
    pairs: list[list[int]] = [[2**31 - 1, -(2**31), 3, 10], [7, -(2**31), 0, 10], [-(2**31), 2**31 - 1, 0, 10]]
    few = 4 if kernel in ("naive", "tiled") and not ON_GPU else 25
    drawn = [[rng.choice(ODD_OFFSETS) if rng.random() < 0.8 else rng.randint(-(2**31), 2**31 - 1) for _ in range(4)]
             for _ in range(2 * few)]  # fmt: skip
    guards = Guards()
    guards.watch(monkeypatch)
    for of_q, of_k in zip(pairs + drawn[:few], pairs[::-1] + drawn[few:], strict=True):
        arguments = packed(cu_seqlens_q=offsets(*of_q), cu_seqlens_k=offsets(*of_k))
        arguments = {n: guards.place(x) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        with contextlib.suppress(UnsupportedProblem):
            call(arguments | {"kernel": kernel})
        if ON_GPU:
            torch.cuda.synchronize()
        guards.assert_intact()
        guards.buffers.clear()


@pytest.mark.skipif(ON_GPU, reason="needs a machine without a GPU")
def test_a_gpu_kernel_by_name_without_a_gpu_names_found_and_needed() -> None:
    """In a fresh process, since this one interprets Triton kernels."""
    code = (
        "import torch, warpwave; q = torch.ones(1, 4, 1, 16)\n"
        "try: warpwave.attention(q, q, q, kernel='flash_fwd')\n"
        "except RuntimeError as e: print(type(e).__name__, e)\n"
        "print(warpwave.attention(q, q, q).sum().item())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    missing = [
        word
        for word in ("UnsupportedProblem", "found tensors on the CPU", "needs an NVIDIA GPU", "64.0")
        if word not in run.stdout
    ]
    if missing:
        pytest.fail(f"{missing} not in {run.stdout!r} {run.stderr[-1000:]!r}")


def test_all_of_this_holds_without_assertions() -> None:
    """What this file and that of paged caches refuse, under `python -O`: checks written as assertions are gone."""
    if sys.flags.optimize:
        pytest.skip("is running under python -O already")
    command = [
        sys.executable,
        "-O",
        "-m",
        "pytest",
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        # Without those that refuse nothing, or ask a process of their own.
        "not unchecked and not by_name_without and not any_numbers and not equal_numbers",
        __file__,
        str(Path(__file__).with_name("test_paged_bad_input.py")),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if run.returncode:
        pytest.fail(run.stdout[-3000:] + run.stderr[-1000:])
