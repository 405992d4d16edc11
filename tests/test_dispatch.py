"""Which kernel is chosen, and what is said when it cannot be."""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from warpwave import dispatch, explain
from warpwave.errors import InvalidInput, InvalidType, UnsupportedProblem
from warpwave.gpu import ARCHS, CPU, INTERPRETER, Gpu
from warpwave.kernels import eager, flash_fwd, torch_sdpa
from warpwave.problem import PRECISIONS, AttentionProblem, Causal

H200 = Gpu.for_arch("sm_90")
PROBLEM = AttentionProblem(
    batch=2,
    seqlen_q=128,
    seqlen_k=128,
    num_heads_q=4,
    num_heads_kv=2,
    head_dim=64,
    head_dim_v=64,
    dtype="bfloat16",
    softmax_scale=0.125,
)


@pytest.mark.parametrize(
    ("change", "gpu", "expected"),
    [
        ({}, H200, "split_kv"),  # one wave of blocks, which begin ahead of the end of the launch before
        ({"seqlen_q": 192, "seqlen_k": 192}, H200, "split_kv"),  # 24 tiles of rows, whose launch begins ahead
        ({"seqlen_q": 192, "seqlen_k": 200}, H200, "flash_fwd"),  # short enough for lighter blocks
        ({"seqlen_q": 30, "seqlen_k": 30}, H200, "split_kv"),
        ({"seqlen_k": 1025}, H200, "split_kv"),
        ({"seqlen_q": 512, "seqlen_k": 2048}, H200, "split_kv"),  # two splits suffice if each tile sees 2,048 keys
        ({"seqlen_q": 512, "seqlen_k": 1900}, H200, "hopper/flash_fwd"),
        ({"seqlen_q": 640, "seqlen_k": 8192}, H200, "hopper/flash_fwd"),  # 80 tiles, more than half of the SMs
        ({"seqlen_q": 512, "seqlen_k": 8192, "head_dim": 192}, H200, "hopper/flash_fwd"),
        ({"seqlen_q": 512, "seqlen_k": 8192, "window_size": (500, 0)}, H200, "hopper/flash_fwd"),
        ({"seqlen_q": 512, "seqlen_k": 8192, "dtype": "float32"}, H200, "hopper/flash_fwd"),
        ({"seqlen_q": 576, "seqlen_k": 8192, "head_dim": 192}, replace(Gpu.for_arch("sm_80"), num_sms=108), "split_kv"),
        ({"seqlen_q": 640, "seqlen_k": 8192}, replace(Gpu.for_arch("sm_80"), num_sms=108), "flash_fwd"),
        ({"seqlen_k": 513}, H200, "split_kv"),  # 16 tiles of rows for 132 SMs
        ({"seqlen_k": 513, "batch": 9}, H200, "hopper/flash_fwd"),
        ({"seqlen_q": 1, "seqlen_k": 4000}, H200, "split_kv"),
        ({"seqlen_q": 16, "seqlen_k": 4000, "dtype": "float32"}, Gpu.for_arch("gfx942"), "split_kv"),
        ({"seqlen_q": 1, "seqlen_k": 64}, H200, "flash_fwd"),
        ({"batch": 17}, H200, "hopper/flash_fwd"),  # 136 tiles, more than SMs
        ({"head_dim": 128}, H200, "hopper/flash_fwd"),
        ({"mask_shape": (1, 1, 128, 128)}, H200, "hopper/flash_fwd"),
        ({"mask_shape": (1, 1, 128, 128), "dtype": "float32"}, H200, "flash_fwd"),
        ({"dtype": "float32"}, H200, "hopper/flash_fwd"),
        ({"dtype": "float32", "precision": "tf32"}, H200, "hopper/flash_fwd"),
        ({"dtype": "float32", "precision": "ieee"}, H200, "flash_fwd"),
        ({}, Gpu.for_arch("sm_100"), "flash_fwd"),
        ({}, Gpu.for_arch("gfx942"), "flash_fwd"),
        ({}, CPU, "torch_sdpa"),
        ({}, INTERPRETER, "torch_sdpa"),
        ({"softcap": 5.0}, CPU, "eager"),
        ({"mask_shape": (1, 1, 128, 128)}, CPU, "torch_sdpa"),
        ({"causal": Causal(), "seqlen_q": 64}, CPU, "torch_sdpa"),
        ({"causal": Causal("top_left"), "seqlen_q": 64}, CPU, "torch_sdpa"),
        ({"return_lse": True}, CPU, "eager"),
        ({"requires_grad": True, "softcap": 5.0}, Gpu.for_arch("sm_80"), "eager"),
        ({"requires_grad": True}, CPU, "eager"),
        ({"head_dim": 257}, H200, "three_kernel"),
        ({"head_dim": 512, "head_dim_v": 512, "seqlen_q": 65}, Gpu.for_arch("sm_80"), "three_kernel"),
        ({"head_dim": 512, "head_dim_v": 512, "seqlen_q": 64, "seqlen_k": 4000}, H200, "large_head_dim"),
        ({"head_dim": 512, "head_dim_v": 512, "batch_invariant": True}, H200, "large_head_dim"),
        ({"head_dim": 8192, "seqlen_q": 64, "seqlen_k": 64, "dtype": "float32"}, H200, "three_kernel"),
        ({"head_dim": 512, "head_dim_v": 512}, CPU, "torch_sdpa"),
        ({"head_dim": 512, "requires_grad": True}, H200, "three_kernel"),
        ({"head_dim": 512, "requires_grad": True}, Gpu.for_arch("sm_80"), "three_kernel"),
        ({"head_dim": 512, "requires_grad": True}, Gpu.for_arch("gfx942"), "eager"),
        ({"head_dim": 512, "requires_grad": True, "softcap": 5.0}, H200, "eager"),
        ({"head_dim_v": 320}, H200, "hopper/flash_fwd"),
        ({"head_dim": 320, "seqlen_q": 1, "seqlen_k": 32768}, H200, "large_head_dim"),  # 4 tiles of rows, for 132 SMs
        ({"head_dim": 320, "seqlen_q": 32, "seqlen_k": 32768, "batch": 17}, H200, "hopper/flash_fwd"),  # 34 whole tiles
        ({"head_dim": 320, "seqlen_q": 32, "seqlen_k": 32768, "batch": 16}, H200, "large_head_dim"),
        ({"head_dim": 320, "seqlen_q": 1, "seqlen_k": 8192, "batch": 33}, H200, "hopper/flash_fwd"),
        ({"head_dim": 320, "seqlen_q": 1, "seqlen_k": 8192, "batch": 32}, H200, "large_head_dim"),
        ({"head_dim": 320, "seqlen_q": 64, "seqlen_k": 32768}, H200, "hopper/flash_fwd"),
        ({"head_dim": 320, "seqlen_q": 1, "seqlen_k": 2047}, H200, "hopper/flash_fwd"),
        ({"head_dim": 320, "seqlen_q": 1, "seqlen_k": 32768, "window_size": (64, 0)}, H200, "hopper/flash_fwd"),
        ({"head_dim": 512, "packed": True, "total_q": 200, "total_k": 200}, H200, "hopper/large_head_dim"),
        ({"head_dim": 512, "packed": True, "total_q": 200, "total_k": 200, "seqlen_q": 64}, H200, "large_head_dim"),
        ({"head_dim": 1024, "packed": True, "total_q": 200, "total_k": 200}, H200, "large_head_dim"),
        ({"dtype": "float32", "head_dim_v": 320}, H200, "three_kernel"),
    ],
)
def test_auto_takes_the_first_that_can(change: dict[str, object], gpu: Gpu, expected: str) -> None:
    assert dispatch.choose(replace(PROBLEM, **change), gpu).kernel.NAME == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "gpu", [CPU, INTERPRETER, *map(Gpu.for_arch, ARCHS)], ids=lambda gpu: f"{gpu.vendor} {gpu.arch}"
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [1, 16, 80, 128, 192, 256, 8192])
def test_every_problem_has_a_kernel_with_a_config(gpu: Gpu, dtype: str, head_dim: int) -> None:
    problem = replace(PROBLEM, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim)
    choice = dispatch.choose(problem, gpu)
    assert choice.config == choice.kernel.configs(problem, gpu)[0]
    assert choice.kernel.why_not(problem, gpu) == []
    for kernel in dispatch.KERNELS:
        assert bool(kernel.why_not(problem, gpu)) or len(kernel.configs(problem, gpu)) >= 1


def test_what_a_kernel_is_outrun_on_it_still_runs_when_asked_by_name() -> None:
    assert dispatch.choose(PROBLEM, H200, "hopper/flash_fwd").kernel.NAME == "hopper/flash_fwd"
    longer = replace(PROBLEM, seqlen_q=192, seqlen_k=200)
    assert list(dispatch.passed_over(longer, H200)) == ["split_kv", "hopper/flash_fwd"]
    assert dispatch.passed_over(replace(PROBLEM, seqlen_k=513), H200) == {}
    ieee = replace(PROBLEM, dtype="float32", precision="ieee")
    assert "hopper/flash_fwd" not in dispatch.passed_over(ieee, H200), "what it cannot run is said elsewhere"
    assert "hopper/flash_fwd is passed over: at most 512 keys" in str(explain(longer, gpu=H200))


def test_gradients_of_their_own_kernel_leave_the_forward_to_the_fastest() -> None:
    trained = replace(PROBLEM, seqlen_q=4096, seqlen_k=4096, window_size=(1023, 0), requires_grad=True)
    forward = replace(trained, requires_grad=False, return_lse=True)
    assert dispatch.forward_of(trained, H200) == (forward, "hopper/flash_bwd")
    assert dispatch.choose(forward, H200).kernel.NAME == "hopper/flash_fwd"
    said = explain(trained, gpu=H200)
    assert (said.kernel, said.gradients) == ("hopper/flash_fwd", "hopper/flash_bwd")
    assert "gradients  hopper/flash_bwd" in str(said)
    own = (replace(forward, return_lse=False), "three_kernel backward")  # which does not read it
    by_name = {"flash_fwd": (forward, "hopper/flash_bwd"), "three_kernel": own, "eager": (trained, "")}
    assert {name: dispatch.forward_of(trained, H200, name) for name in by_name} == by_name
    odd = replace(trained, head_dim=60)
    assert dispatch.forward_of(odd, H200)[1] == "flash_bwd", "no multiple of 16 bytes for TMA"
    wide = replace(trained, head_dim=320, head_dim_v=320)
    for arch in ("sm_90", "sm_80"):
        assert dispatch.forward_of(wide, Gpu.for_arch(arch))[1] == "three_kernel backward"
    assert dispatch.forward_of(replace(wide, softcap=5.0), H200)[1] == ""
    assert dispatch.forward_of(trained, CPU) == (trained, ""), "eager's gradients take the statistics of its forward"
    assert dispatch.forward_of(forward, H200) == (forward, "")


@pytest.mark.parametrize(
    ("arch", "changes", "expected"),
    [
        ("sm_90", {"head_dim": 192}, "three_kernel backward"),
        ("sm_80", {"head_dim": 192, "causal": Causal()}, "three_kernel backward"),
        ("sm_80", {"head_dim": 192, "seqlen_q": 128, "seqlen_k": 128, "batch": 8}, "flash_bwd"),
        ("sm_80", {"head_dim": 192, "bias_shape": (1, 1, 2048, 2048)}, "flash_bwd"),
        ("sm_80", {"head_dim": 192, "dropout_p": 0.1}, "flash_bwd"),
        ("sm_80", {"head_dim": 192, "precision": "tf32"}, "flash_bwd"),
        ("sm_80", {"head_dim": 192, "dtype": "bfloat16"}, "flash_bwd"),
        ("gfx942", {"head_dim": 192}, "flash_bwd"),
        ("sm_89", {"head_dim": 96}, "three_kernel backward"),
        ("sm_89", {"head_dim": 96, "causal": Causal()}, "three_kernel backward"),
        ("sm_89", {"head_dim": 96, "seqlen_q": 512, "seqlen_k": 512}, "flash_bwd"),
        ("sm_89", {"head_dim": 96, "window_size": (128, 0)}, "flash_bwd"),
        ("sm_89", {"head_dim": 192, "window_size": (128, 0)}, "three_kernel backward"),
        ("sm_100", {"head_dim": 96}, "flash_bwd"),
        ("sm_89", {"head_dim": 64}, "flash_bwd"),
        ("sm_90", {"head_dim": 96}, "hopper/flash_bwd"),
    ],
)
def test_float32_gradients_of_wide_heads_go_to_torch_products(
    arch: str, changes: dict[str, object], expected: str
) -> None:
    wide = replace(PROBLEM, dtype="float32", seqlen_q=2048, seqlen_k=2048, requires_grad=True)
    problem, gpu = replace(wide, **{"head_dim_v": changes["head_dim"], **changes}), Gpu.for_arch(arch)  # type: ignore[arg-type]
    assert dispatch.forward_of(problem, gpu)[1] == expected
    if expected == "three_kernel backward" and problem.head_dim <= 256:
        assert dispatch.forward_of(problem, gpu, "flash_fwd")[1] != expected, "a named kernel has the first that can"


def test_float32_gradients_stay_where_torch_may_round_products() -> None:
    """three_kernel would compute the products in float64."""
    wide = replace(PROBLEM, dtype="float32", head_dim=192, head_dim_v=192, seqlen_q=2048, seqlen_k=2048)
    matmul = torch.backends.cuda.matmul
    before, found = matmul.fp32_precision, []
    try:
        for matmul.fp32_precision in ("ieee", "tf32"):
            found.append(dispatch.gradient_kernels(wide, Gpu.for_arch("sm_89"))[0].NAME)
    finally:
        matmul.fp32_precision = before
    assert found == ["three_kernel backward", "flash_bwd"]


def test_results_are_kept_if_any_kernel_of_gradients_may_read_them() -> None:
    """The setting of float32 products may change between forward and backward."""
    wide = replace(PROBLEM, dtype="float32", head_dim=192, head_dim_v=192, seqlen_q=2048, seqlen_k=2048)
    assert dispatch.reads_results(wide, Gpu.for_arch("sm_89"), "auto")
    assert not dispatch.reads_results(replace(wide, head_dim=320), Gpu.for_arch("sm_89"), "auto")


def test_gradients_of_wide_heads_serve_kernels_without_gradients() -> None:
    wide = replace(PROBLEM, head_dim=512, head_dim_v=512, requires_grad=True)
    for kernel in ("auto", "large_head_dim", "three_kernel"):
        assert dispatch.forward_of(wide, Gpu.for_arch("sm_80"), kernel)[1] == "three_kernel backward"
    for gpu in (Gpu.for_arch("gfx942"), CPU, replace(Gpu.for_arch("sm_80"), arch="sm_75")):
        assert dispatch.gradient_kernels(wide, gpu) == []


def test_a_named_kernel_runs_or_raises_with_its_reasons() -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        dispatch.choose(replace(PROBLEM, head_dim=320, head_dim_v=300, requires_grad=True), H200, "flash_fwd")
    assert list(caught.value.reasons) == ["flash_fwd"]
    text = str(caught.value)
    assert "head_dim is 320" in text and "head_dim_v is 300" in text and "gradients" in text
    assert "kernel='three_kernel'" in text, "the nearest choice is named"
    handed_on = pickle.loads(pickle.dumps(caught.value))  # as a worker process does
    assert (str(handed_on), handed_on.reasons) == (text, caught.value.reasons)


def test_a_gpu_kernel_for_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a usable GPU it is a mistake of type; without one, the sentence says what is missing."""
    monkeypatch.setattr(dispatch, "_a_gpu_is_there", lambda: True)
    with pytest.raises(InvalidType, match=r"q is on the CPU; move q, k and v with \.cuda\(\)"):
        dispatch.choose(PROBLEM, CPU, "flash_fwd")
    monkeypatch.setattr(dispatch, "_a_gpu_is_there", lambda: False)
    with pytest.raises(RuntimeError, match=r"found tensors on the CPU; it needs an NVIDIA GPU"):
        dispatch.choose(PROBLEM, CPU, "flash_fwd")


def test_a_gpu_too_old() -> None:
    turing = replace(H200, name="Tesla T4", arch="sm_75", smem_per_block_bytes=64 * 1024)
    assert dispatch.choose(PROBLEM, turing).kernel is dispatch.eager
    with pytest.raises(RuntimeError, match=r"found Tesla T4 \(sm_75\); it needs sm_80 or newer"):
        dispatch.choose(PROBLEM, turing, "flash_fwd")


@pytest.mark.parametrize(
    ("asked", "config", "error", "text"),
    [
        ("flash", None, InvalidInput, "kernel is 'flash'; it must be 'auto' or one of 'split_kv'"),
        ("auto", flash_fwd.Config(64, 64, 4, 2), InvalidInput, "name the kernel the config is for"),
        ("flash_fwd", eager.Config(64, 64), InvalidType, "kernel 'flash_fwd' takes warpwave.kernels.flash_fwd.Config"),
        ("torch_sdpa", 7, InvalidType, "config is a int"),
    ],
)
def test_wrong_kernel_or_config(asked: str, config: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        dispatch.choose(PROBLEM, CPU if asked == "torch_sdpa" else H200, asked, config)
    assert text in str(caught.value)


def test_a_given_config_is_used_and_said() -> None:
    config = flash_fwd.Config(32, 32, 4, 1)
    choice = dispatch.choose(PROBLEM, H200, "flash_fwd", config)
    assert (choice.config, choice.config_source) == (config, "given")


def test_kernels_have_the_anatomy_the_dispatcher_documents() -> None:
    for kernel in dispatch.KERNELS:
        assert kernel.__name__.endswith(kernel.NAME.replace("/", "."))
        for part in ("NEEDS_GPU", "Config", "why_not", "cost", "configs", "bind"):
            assert hasattr(kernel, part), f"{kernel.NAME} has no {part}"
        assert "Bound:" in str(sys.modules[kernel.__name__].__doc__), f"{kernel.NAME} does not say what bounds it"


def test_torch_sdpa_names_each_difference() -> None:
    problem = replace(
        PROBLEM, softcap=1.0, has_sinks=True, window_size=(1, 1), seqlen_q=8192, seqlen_k=8192, return_lse=True
    )
    text = "\n".join(torch_sdpa.why_not(problem, CPU))
    for word in ("lse", "mask of 8,192 x 8,192", "softcap", "sinks"):
        assert word in text


WIDTHS = (
    1,
    8,
    16,
    40,
    64,
    65,
    80,
    96,
    128,
    160,
    192,
    224,
    225,
    232,
    240,
    256,
    257,
    320,
    384,
    512,
    576,
    640,
    1024,
    8192,
)
LENGTHS = (0, 1, 2, 7, 16, 64, 65, 128, 300, 512, 1024, 2048, 16384)


def drawn_problem(rng: random.Random) -> AttentionProblem:
    """Any problem that a call can have, by its sizes and features."""
    head_dim, other = rng.choice(WIDTHS), rng.choice(WIDTHS)
    seqlen_q, seqlen_k, batch = rng.choice(LENGTHS), rng.choice(LENGTHS), rng.choice((1, 2, 5, 64))
    heads_kv, dtype, kind = rng.choice((1, 2, 8)), rng.choice(("float16", "bfloat16", "float32")), rng.random()
    heads = heads_kv * rng.choice((1, 2, 3, 8, 16))
    more: dict[str, Any] = {}
    if kind < 0.6:
        shapes = [(1, 1, seqlen_q, seqlen_k), (batch, heads, seqlen_q, seqlen_k), (1, heads, 1, seqlen_k)]
        if rng.random() < 0.4:
            more["mask_shape"] = rng.choice(shapes)
        if rng.random() < 0.4:
            more |= {"bias_shape": rng.choice(shapes), "bias_dtype": rng.choice((dtype, "float32"))}
    elif kind < 0.8:
        more |= {"packed": True, "total_q": batch * seqlen_q, "total_k": batch * seqlen_k}
    else:
        more |= {"page_size": rng.choice((1, 16, 48, 64, 256)), "batch_invariant": rng.random() < 0.3}
        if dtype != "float32" and rng.random() < 0.2:
            more |= {"dtype_kv": rng.choice(("float8_e4m3fn", "int8")), "kv_factors": rng.choice(("head", "token"))}
    if rng.random() < 0.5:
        more["causal"] = Causal(rng.choice(("bottom_right", "top_left")))
    if rng.random() < 0.3:
        more["window_size"] = (rng.choice((-1, 0, 40, 1024)), rng.choice((-1, 0, 5)))
    if rng.random() < 0.2:
        more["softcap"] = 15.0
    if dtype == "float32":
        budget = rng.random() < 0.2
        more |= {"error_budget": 10 ** rng.uniform(-9, -1)} if budget else {"precision": rng.choice(PRECISIONS)}
    return AttentionProblem(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=heads, num_heads_kv=heads_kv, head_dim=head_dim,
        head_dim_v=head_dim if rng.random() < 0.5 else other, dtype=dtype, softmax_scale=0.1,
        alibi_shape=(heads,) if rng.random() < 0.2 else None, has_sinks=rng.random() < 0.2,
        return_lse=rng.random() < 0.5, requires_grad="page_size" not in more and rng.random() < 0.2, **more,
    )  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
def test_what_a_kernel_claims_it_has_a_config_for(arch: str) -> None:
    """Of every card, whether or not it is known how many multiprocessors it has; and `auto` runs or says why not."""
    rng = random.Random(arch)
    unknown = Gpu.for_arch(arch)
    for gpu in (unknown, replace(unknown, num_sms=132, memory_bytes=80 << 30)):
        for _ in range(40):
            problem = drawn_problem(rng)
            for module in dispatch.kernels_for(problem):
                if not module.why_not(problem, gpu):
                    config = dispatch.default_config(module, problem, gpu)
                    assert isinstance(config, module.Config), f"{module.NAME} on {arch}: {problem.describe()}"
            try:
                dispatch.choose(problem, gpu)
            except UnsupportedProblem as refusal:
                assert problem.error_budget is not None, refusal


@pytest.mark.parametrize(
    ("arch", "change"),
    [
        ("sm_90", {"head_dim": 256, "head_dim_v": 240, "bias_shape": (2, 4, 128, 128), "bias_dtype": "float32"}),
        ("sm_86", {"dtype": "float32", "precision": "bf16x6", "head_dim": 224, "head_dim_v": 65,
                   "mask_shape": (2, 4, 128, 128)}),
    ],
)  # fmt: skip
def test_problems_that_once_had_no_config(arch: str, change: dict[str, Any]) -> None:
    gpu, problem = Gpu.for_arch(arch), replace(PROBLEM, seqlen_q=128, **change)
    claims = {module.NAME for module in dispatch.KERNELS if not module.why_not(problem, gpu)}
    assert "flash_fwd" in claims and "hopper/flash_fwd" not in claims
    for module in dispatch.KERNELS:
        if module.NAME in claims:
            assert isinstance(dispatch.default_config(module, problem, gpu), module.Config)


def test_a_budget_that_nothing_keeps_is_said_in_one_line() -> None:
    problem = replace(PROBLEM, dtype="float32", error_budget=1e-9)
    with pytest.raises(UnsupportedProblem) as refusal:
        dispatch.choose(problem, H200)
    said = str(refusal.value).splitlines()
    assert len(said) == 3 and "1e-09" in said[1] and "smallest promised error" in said[1]


def test_the_smallest_promised_error_is_one_that_no_kernel_undercuts() -> None:
    problem = replace(PROBLEM, dtype="float32", error_budget=5e-7)
    with pytest.raises(UnsupportedProblem) as refusal:
        dispatch.choose(problem, H200)
    least = float(str(refusal.value).split("promised error for this call is ")[1].split(",")[0])
    assert dispatch.choose(replace(problem, error_budget=1.03 * least), H200).kernel.NEEDS_GPU
    with pytest.raises(UnsupportedProblem):
        dispatch.choose(replace(problem, error_budget=0.97 * least), H200)
