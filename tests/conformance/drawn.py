"""Draws random calls from the whole space that the kernels claim to support, and checks each against float64.

A grid of chosen cases misses pairs of values that nobody thought of. Here types, widths, lengths, features, strides,
pages, configs, gradients, and a kernel that claims the call are drawn. The results must meet the contract: the gates,
minus infinity and zeros where the reference has them, equal bits if the call is repeated, and unchanged inputs.
`drawn_processes` checks the calls of many seeds.

    python -m tests.conformance.drawn --minutes 5            many processes, because compiling takes most of the time
    python -m tests.conformance.drawn --calls 3000 --seed 7
    python -m tests.conformance.drawn --one 123456           one call again, as a failure prints it
    CARD=sm_80 python -m tests.conformance.drawn             in the code of another GPU (`benchmarks.card_code`)

Four successive seeds share the compiled code (widths, type, features, kernel) and differ in lengths, strides and data.
"""

from __future__ import annotations

import importlib
import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The command exits before the rest of this file, because drawn_processes imports this module and executes the rest.
if __name__ == "__main__":
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from tests.conformance.drawn_processes import main

    sys.exit(main())

if os.environ.get("CARD"):  # before `harness` asks for the GPU
    importlib.import_module("benchmarks.card_code")

from tests.conformance import cases, harness, paged
from tests.conformance.cases import Case
from tests.conformance.datasets import DATA_SETS, Data
from tests.conformance.gates import backward_references, forward_references, judge_backward, judge_forward
from tests.conformance.harness import DEVICE, GPU, ON_GPU, bits
from tests.conformance.paged import PagedCase
from warpwave import dispatch
from warpwave.problem import PRECISIONS

ALIKE = 4  # seeds that share what is compiled
# Where tiles, swizzles and pieces of widths begin and end, and their neighbors.
WIDTHS = (
    *(1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 48, 56, 59, 63, 64, 65, 72, 80, 88, 96, 104, 111, 112, 120),
    *(127, 128, 129, 136, 144, 160, 176, 192, 193, 200, 224, 240, 248, 255, 256),
)
ALIGNED = tuple(width for width in WIDTHS if width % 8 == 0)  # which tensor maps can describe
LATENTS = ((576, 512), (576, 512), (640, 640), (320, 256), (264, 256), (192, 128), (136, 128), (448, 384), (72, 40))
LATENT_HEADS = ((1, 1), (3, 1), (16, 1), (17, 1), (24, 1), (128, 1))
WIDE = (257, 264, 288, 300, 320, 352, 384, 392, 448, 511, 512, 513, 576, 640, 700)
LENGTHS = (1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 127, 128, 129, 191, 193, 255, 257, 300)
LONG = (511, 513, 700, 1000, 1023, 1024, 1025, 1537, 2049)
HEADS = ((1, 1), (2, 2), (4, 4), (6, 2), (8, 1), (3, 1), (12, 3), (8, 2), (32, 8), (5, 5))
FEW_HEADS = ((1, 1), (2, 2), (4, 2), (3, 1), (6, 2))
SCALES = (None, None, None, None, 0.3, 1.0, 0.0, 1e-42, 1e-3)
SLOW = ("tiled", "naive")


class Drawn(NamedTuple):
    """One drawn call, as data.

    Attributes:
        seed: draws it again.
        case: dense, packed or paged.
        kernel: its name, or "auto".
        config: of the kernel, None for its default.
        gradients: whether gradients are checked too.
        hidden_nan: whether keys and values that no query sees hold NaN.
        far: which of q, k and v lies beyond 2^31 elements of its storage, "" for none.
        budget: a relative error as `precision`, None for the case's own.
        options: of calls on a cache: `num_splits`, `batch_invariant`.
    """

    seed: int
    case: Case | PagedCase
    data: Data
    kernel: str
    config: Any
    gradients: bool
    hidden_nan: bool
    far: str
    budget: float | None
    options: dict[str, Any]

    def __str__(self) -> str:
        extras = [f"config={self.config}"] if self.config is not None else []
        extras += [name for name in ("gradients", "hidden_nan") if getattr(self, name)]
        extras += [f"far {self.far}"] if self.far else []
        extras += [f"budget {self.budget:g}"] if self.budget is not None else []
        extras += [f"{k}={v}" for k, v in self.options.items()]
        return f"{self.seed}: {self.kernel} on {self.case}, {self.data}, {', '.join(extras)}"


# Drawing --------------------------------------------------------------------------------------------------------------


def draw(seed: int) -> Drawn:
    """Returns the call of a seed for this machine's device. Its kernel is drawn from those that claim the call."""
    of_class, of_call = random.Random(f"class {seed // ALIKE}"), random.Random(f"call {seed}")
    if of_class.random() < 0.2:
        return _draw_paged(seed, of_class, of_call)
    return _draw_dense(seed, of_class, of_call)


def _width(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(ALIGNED)
    if kind < 0.65:
        return rng.choice(WIDTHS)
    return rng.choice(WIDE) if kind < 0.75 else rng.randint(1, 256) if kind < 0.95 else rng.randint(257, 700)


def _widths(rng: random.Random) -> tuple[int, int]:
    width = _width(rng)
    return (width, width) if rng.random() < 0.45 else (width, _width(rng))


def _length(rng: random.Random) -> int:
    if ON_GPU and rng.random() < 0.3:
        return rng.choice(LONG) if rng.random() < 0.7 else rng.randint(1, 2100)
    return rng.choice(LENGTHS) if rng.random() < 0.7 else rng.randint(1, 300)


def _widths_of_one_launch(rng: random.Random) -> tuple[int, int]:
    """Returns widths of calls whose gradients one launch may compute on Hopper."""
    if rng.random() < 0.2:
        return rng.choice([(192, 128), (160, 160), (136, 136), (128, 192), (176, 40), (144, 152)])
    narrow = [width for width in ALIGNED if width <= 128]
    width = rng.choice(narrow)
    return width, width if rng.random() < 0.7 else rng.choice(narrow)


def _dtype(rng: random.Random) -> str:
    kind = rng.random()
    return "float16" if kind < 0.33 else "bfloat16" if kind < 0.66 else f"float32:{rng.choice(PRECISIONS)}"


def _quantized_dtype(rng: random.Random, packed: bool) -> str:
    """Returns the dtype of q and k, that of v, and what shares a factor. Blocks of packed tokens have no factors."""
    dtype = rng.choice(("float8_e4m3fn", "float8_e5m2", "int8", "int8"))
    of_v = rng.choice((*(("int8",) if dtype == "int8" else ("float8_e4m3fn", "float8_e5m2")), "float16", "bfloat16"))
    return f"{dtype}:{of_v}:{rng.choice(('tensor', 'head', '64', '128')[: 2 if packed else 4])}"


def _window(rng: random.Random) -> tuple[int, int]:
    left, right = (rng.choice((-1, -1, 0, 1, 5, 31, 64, 100, 500)) for _ in range(2))
    return left, right


def _latent(rng: random.Random) -> dict[str, Any]:
    """Returns features of calls on a latent cache, most of which a launch of Hopper's own takes."""
    features: dict[str, Any] = {
        "dims": rng.choice(LATENTS),
        "v_in_k": True,
        "dtype": rng.choice(("float16", "bfloat16")),
    }
    if rng.random() < 0.7:
        features |= {"softcap": 0.0, "alibi": False}
    return features


def _draw_dense(seed: int, of_class: random.Random, of_call: random.Random) -> Drawn:
    packed, gradients = of_class.random() < 0.3, of_class.random() < 0.2
    dims, quantized = _widths(of_class), not gradients and of_class.random() < 0.2
    dtype = _quantized_dtype(of_class, packed) if quantized else _dtype(of_class)
    plain = gradients and of_class.random() < 0.5  # what kernels' own gradients take
    if plain and of_class.random() < 0.6:  # otherwise few of these calls could take the joint launch
        dims, dtype = _widths_of_one_launch(of_class), of_class.choice(("float16", "bfloat16"))
    features: dict[str, Any] = {"dtype": dtype, "dims": dims, "packed": packed, "lse": of_class.random() < 0.6}
    features["causal"] = of_class.choice(("", "", "bottom_right", "top_left"))
    has_window = of_class.random() < 0.3
    features["sinks"] = of_class.random() < 0.2
    if not plain:
        features["alibi"] = of_class.choice(("", "", "", "heads", "batch"))
        features["softcap"] = of_class.choice((0.0, 0.0, 0.0, 15.0, 50.0))
        if not packed:
            features["mask"] = of_class.choice(("", "", "", "full", "keys", "rows"))
            features["bias"] = of_class.choice(("", "", "", "full", "heads"))
    features["layout"] = of_class.choice(tuple(cases.LAYOUTS) if not packed else PACKED_LAYOUTS)
    by_name, name, index = of_class.random() < 0.8, of_class.random(), of_class.random()
    other_config = of_class.random() < 0.25
    budget = 10.0 ** of_class.uniform(-6.3, -2) if dtype == "float32:default" and of_class.random() < 0.2 else None

    is_latent = not (packed or gradients or quantized) and of_class.random() < 0.12
    if is_latent:
        features |= _latent(of_class) | {"alibi": "", "mask": "", "bias": ""}
    interpreted = not ON_GPU and name < INTERPRETED_SHARE
    if interpreted and max(dims) > INTERPRETED_WIDTH:
        features["dims"] = (min(dims[0], INTERPRETED_WIDTH), min(dims[1], INTERPRETED_WIDTH))
    lengths = (_length(of_call), _length(of_call))
    if of_call.random() < 0.4:
        lengths = (lengths[0], lengths[0])
    if interpreted:
        lengths = (min(lengths[0], INTERPRETED_LENGTH), min(lengths[1], INTERPRETED_LENGTH))
    if gradients and ON_GPU and of_call.random() < 0.3:  # few queries on many keys, or the reverse
        one_side = of_call.randint(1, 128), of_call.randint(129, 2000)
        lengths = one_side if of_call.random() < 0.5 else one_side[::-1]
    if gradients:  # differences that cancel to 0 have no scale to hold their rounding against (test_gradients.py)
        lengths, has_window = (lengths[0], max(40, lengths[1])), False
    case = Case(
        **features,
        lengths=lengths,
        heads=of_call.choice(
            LATENT_HEADS if is_latent else HEADS if ON_GPU else INTERPRETED_HEADS if interpreted else FEW_HEADS
        ),
        batch=1 if interpreted else of_call.choice((1, 1, 2, 2, 3, 5)),
        window=_window(of_call) if has_window else (-1, -1),
        scale=None if gradients else of_call.choice(SCALES),
    )
    # In float32 on the low data, dq is a small difference of terms that all have the mean key as a factor.
    data = of_call.choice(DATA_SETS if not gradients else DATA_SETS[:2])
    problem = cases.build(case, data, torch.device("cpu")).problem
    problem = replace(problem, requires_grad=gradients, error_budget=budget)
    able = _able(problem)
    if budget is not None and not any(ON_GPU or not m.NEEDS_GPU for m in able):  # nothing that "auto" takes keeps it
        budget, problem = None, replace(problem, error_budget=None)
        able = _able(problem)
    kernel, config = _choose(problem, able, by_name, name, index, other_config)
    far = of_call.choice("qkv") if ON_GPU and of_call.random() < 0.01 else ""
    hidden_nan = of_call.random() < 0.3 and "low" != data
    return Drawn(seed, case, data, kernel, config, gradients, hidden_nan, far, budget, {})


# Of a CPU's classes of calls, the share that Triton's interpreter runs, and their sizes: it takes milliseconds a tile,
# and three_kernel's softmax 10 ms for each row of each head.
INTERPRETED_SHARE, INTERPRETED_WIDTH, INTERPRETED_LENGTH = 0.4, 320, 75
INTERPRETED_HEADS = ((1, 1), (2, 2), (2, 1))
PACKED_LAYOUTS = tuple(name for name in cases.LAYOUTS if name != "one item for all")


def _able(problem: Any) -> list[Any]:
    """Returns the kernels that claim a call, or its forward, if others compute the gradients."""
    forwards = {m: dispatch.forward_of(problem, GPU, m.NAME)[0] for m in dispatch.kernels_for(problem)}
    return [m for m, forward in forwards.items() if not dispatch.why_not(m, forward, GPU)]


def _choose(
    problem: Any, able: Sequence[Any], by_name: bool, name: float, index: float, other_config: bool
) -> tuple[str, Any]:
    """Draws a kernel of those that claim the call, and one of its configs."""
    if not ON_GPU:
        able = [m for m in able if m.NAME not in SLOW or name < 0.02]
        if name > INTERPRETED_SHARE:
            able = [m for m in able if not m.NEEDS_GPU]
    if not by_name or not able:
        return "auto", None
    ours = [m for m in able if m.NAME not in SLOW]
    able = ours if ON_GPU and index < 0.8 and ours else able
    weights = [3 if m.NAME.startswith("hopper/") else 1 for m in able]
    module = random.Random(name).choices(able, weights)[0]
    if not other_config:
        return module.NAME, None
    configs = module.configs(problem, GPU)
    config = configs[int(index * len(configs))]
    if not ON_GPU and getattr(config, "block_m", 64) > 128 and module.NEEDS_GPU:
        config = None
    return module.NAME, config


def _draw_paged(seed: int, of_class: random.Random, of_call: random.Random) -> Drawn:
    packed = of_class.random() < 0.4
    features: dict[str, Any] = {
        "page_size": of_class.choice((1, 2, 8, 16, 32, 64, 128, 256)),
        "dims": _widths(of_class), "dtype": _dtype(of_class), "packed": packed,
        "causal": of_class.choice(("", "bottom_right", "bottom_right", "top_left")),
        "alibi": of_class.random() < 0.2, "softcap": of_class.choice((0.0, 0.0, 0.0, 20.0)),
        "sinks": of_class.random() < 0.2, "lse": of_class.random() < 0.6,
    }  # fmt: skip
    by_name, name, index = of_class.random() < 0.8, of_class.random(), of_class.random()
    has_window, other_config = of_class.random() < 0.3, of_class.random() < 0.2
    if is_latent := of_class.random() < 0.25:
        features |= _latent(of_class)
    interpreted = not ON_GPU and name < INTERPRETED_SHARE
    if interpreted:
        features["dims"] = (min(features["dims"][0], INTERPRETED_WIDTH), min(features["dims"][1], INTERPRETED_WIDTH))
    batch = of_call.choice((1, 2, 3) if interpreted else (1, 2, 3, 5, 9))
    seqlen_q = of_call.choice((1, 1, 1, 2, 3, 4, 8, 17, 65, *((130, 300) if ON_GPU else ())))
    lengths = []
    for _ in range(batch):
        keys = 0 if of_call.random() < 0.1 else _length(of_call) * (3 if ON_GPU else 1)
        keys = min(keys, 2 * INTERPRETED_LENGTH) if interpreted else keys
        queries = of_call.choice((0, 1, 1, 1, 3, 17, 70, *((200, 500) if ON_GPU else ()))) if packed else seqlen_q
        lengths.append((min(queries, keys) if packed else queries, keys))
    longest = max(1, *(k for _, k in lengths))
    case = PagedCase(
        **features,
        heads=of_call.choice(LATENT_HEADS if is_latent else HEADS if ON_GPU else FEW_HEADS),
        lengths=tuple(lengths),
        window=_window(of_call) if has_window else (-1, -1),
        max_seqlen_k=longest + of_call.choice((0, 1, 100)),
    )
    data = of_call.choice(DATA_SETS)
    options: dict[str, Any] = {"batch_invariant": True} if of_call.random() < 0.15 else {}
    problem = replace(paged.build(case, data, torch.device("cpu")).problem, lengths=None)
    problem = replace(problem, batch_invariant="batch_invariant" in options)
    kernel, config = _choose(problem, _able(problem), by_name, name, index, other_config and not options)
    if config is None and not options and of_call.random() < 0.3:
        options["num_splits"] = of_call.randint(1, 7)
    return Drawn(seed, case, data, kernel, config, False, True, "", None, options)


# Checking -------------------------------------------------------------------------------------------------------------


def check(drawn: Drawn) -> str | None:
    """Runs a drawn call. Returns the fault, or None.

    The rounding model's own error is one draw too. Where few numbers are compared it may be arbitrarily small, so a
    call that misses a gate with finite results is judged again on other data: what is wrong misses it each time.
    """
    wrong = _check(drawn, 0)
    if wrong is None or not wrong.startswith(GATES) or "nan" in wrong or "inf" in wrong:
        return wrong
    return wrong if all(_check(drawn, other) for other in range(1, 5)) else None


GATES = "gates fail"


def _check(drawn: Drawn, other_data: int) -> str | None:
    if isinstance(drawn.case, PagedCase):
        return _check_paged(drawn, drawn.case, other_data)
    return _check_dense(drawn, drawn.case, other_data)


def _check_dense(drawn: Drawn, case: Case, other_data: int) -> str | None:
    call = cases.build(case, drawn.data, DEVICE, (drawn.seed + other_data * 7919) % 2**31)
    if drawn.budget is not None:
        options = call.options | {"precision": drawn.budget}
        call = call._replace(problem=replace(call.problem, error_budget=drawn.budget), options=options)
    given = call
    if drawn.hidden_nan:
        given = call._replace(operands=_with_hidden_nan(call))
    if drawn.far:
        given = given._replace(operands=_far(given.operands, drawn.far))
    before = bits(*given.operands[:3])
    out, lse = harness.run(drawn.kernel, given, drawn.config)
    again = harness.run(drawn.kernel, given, drawn.config)
    if bits(out, lse) != bits(*again):
        return "a second run has other bits"
    if bits(*given.operands[:3]) != before:
        return "an input was written"
    references = forward_references(call.problem, call.operands)
    if drawn.budget is None:
        verdict = judge_forward(call.problem, references, out, lse)
        if not verdict.passed:
            return str(verdict)
    else:  # which is promised for logits up to 40; from there on the error grows with the logit
        allowed = drawn.budget * max(1.0, references.exact.largest_logit / 40)
        if (error := _relative(out, references.exact.out)) > allowed:
            return f"relative error {error:.3g}, more than the budget {drawn.budget:.3g} allows"
    if (out[_unseen(call, references.exact.lse)] != 0).any():
        return "a row that sees nothing is not 0"
    return _check_gradients(drawn, given, call) if drawn.gradients else None


def _relative(got: Tensor, exact: Tensor) -> float:
    largest = exact.norm().item()
    return (got.double() - exact).norm().item() / largest if largest else got.double().norm().item()


def _unseen(call: cases.Call, lse: Tensor) -> Tensor:
    """Returns which rows of out, (..., heads), see no key and no sink."""
    return (lse == -math.inf).transpose(-1, -2)


def _check_gradients(drawn: Drawn, given: cases.Call, call: cases.Call) -> str | None:
    from tests.conformance.test_gradients import differentiate, upstream

    dout, dlse = upstream(call)
    if drawn.kernel != "auto":
        given = given._replace(options=given.options | {"deterministic": True})
    got = differentiate(drawn.kernel, given, dout, dlse)
    if drawn.kernel != "auto" and bits(*got) != bits(*differentiate(drawn.kernel, given, dout, dlse)):
        return "gradients of a second run have other bits"
    most = max(int(shown.sum(-1).max()) if shown.numel() else 0 for shown in harness.visible(call))
    if drawn.budget is not None:  # promised of out alone; gradients have the error of the same products
        exact = backward_references(call.problem, call.operands, dout, dlse).exact
        pairs = [(a, b) for a, b in zip(got, exact, strict=True) if a is not None and b is not None]
        error = max(_relative(a, b) for a, b in pairs)
        allowed = 100 * drawn.budget
        return f"gradients: relative error {error:.3g}, more than {allowed:.3g}" if error > allowed else None
    # The derivative of a cap that saturates, and dq and dk of rows with few keys, are differences that cancel to 0.
    if (call.problem.softcap and drawn.data != "normal") or most < 4:
        finite = all(t is None or bool(t.isfinite().all()) for t in got)
        return None if finite else "a gradient is not finite"
    verdict = judge_backward(call.problem, backward_references(call.problem, call.operands, dout, dlse), got)
    return None if verdict.passed else f"{verdict}"


def _with_hidden_nan(call: cases.Call) -> Any:
    """Returns the operands with NaN in the keys and values that no query sees, in int8 with the lowest number."""
    group = call.problem.num_heads_q // call.problem.num_heads_kv
    k, v = (_independent(t).clone() for t in call.operands[1:3])
    if call.operands.k.data_ptr() == call.operands.v.data_ptr():
        v = k[..., : v.shape[-1]]
    for shown, keys, values in zip(
        harness.visible(call), _by_keys(call, k), _by_keys(call, v), strict=True
    ):  # [heads, rows, keys], [keys, heads, width]
        unseen = ~shown.any(1).unflatten(0, (-1, group)).any(1)  # [kv heads, keys]
        for x in (keys, values):
            as_bytes = x.element_size() == 1  # torch sets no chosen elements of float8, where 0x7F is NaN
            poison = math.nan if not as_bytes else 0x80 if x.dtype == torch.int8 else 0x7F
            (x.view(torch.uint8) if as_bytes else x)[unseen.T] = poison
    return call.operands._replace(k=k, v=v)


def _independent(t: Tensor) -> Tensor:
    return t.contiguous() if 0 in t.stride() else t


def _by_keys(call: cases.Call, x: Tensor) -> list[Tensor]:
    if not call.problem.packed:
        return list(x)
    return list(x.split(call.operands.cu_seqlens_k.diff().tolist()))


def _far(operands: Any, name: str) -> Any:
    """Returns the operands, one of them beyond the first 2^31 elements of its storage."""
    tensor = getattr(operands, name)
    buffer = torch.empty(2**31 + 64 + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    place = buffer[2**31 + 16 : 2**31 + 16 + tensor.numel()].view(tensor.shape)
    return operands._replace(**{name: place.copy_(tensor)})


def _check_paged(drawn: Drawn, case: PagedCase, other_data: int) -> str | None:
    call = paged.build(case, drawn.data, DEVICE, (drawn.seed + other_data * 7919) % 2**31)
    options = drawn.options | ({"config": drawn.config} if drawn.config is not None else {})
    before = bits(*call.operands[:3])
    out, lse = paged.run(drawn.kernel, call, **options)
    if bits(out, lse) != bits(*paged.run(drawn.kernel, call, **options)):
        return "a second run has other bits"
    if bits(*call.operands[:3]) != before:
        return "an input was written"
    operands: Any = call.operands
    references = forward_references(call.problem, operands)
    verdict = judge_forward(call.problem, references, out, lse)
    return None if verdict.passed else str(verdict)


def problem_of(drawn: Drawn) -> Any:
    """Returns the problem of a drawn call."""
    build: Any = paged.build if isinstance(drawn.case, PagedCase) else cases.build
    return replace(build(drawn.case, drawn.data, torch.device("cpu")).problem, requires_grad=drawn.gradients)


def repro(seed: int) -> str:
    """Returns five lines of code that run one drawn call."""
    set_first = {"TRITON_INTERPRET": "" if ON_GPU else "1", "CARD": os.environ.get("CARD", "")}
    lines = [f"import os; os.environ['{name}'] = '{value}'" for name, value in set_first.items() if value]
    return "\n".join(
        [*lines, "from tests.conformance import drawn", f"call = drawn.draw({seed})", "print(call)",
         "print(drawn.check(call) or 'as it should be')"]
    )  # fmt: skip
