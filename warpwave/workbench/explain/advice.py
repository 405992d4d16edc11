"""What to change about a call: sentences that follow from its bounds, each with the arithmetic, for `explain`.

A recommendation names the bound that falls, from what to what; where a figure depends on what nobody measured, it says
what to time. No factor is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from warpwave.gpu import Gpu
from warpwave.kernels.cost import Cost
from warpwave.precision import ARITHMETICS, PORTABLE, arithmetic
from warpwave.problem import DTYPE_BYTES, AttentionProblem, Band
from warpwave.workbench.explain.near_misses import as_positional
from warpwave.workbench.model.predict import Prediction
from warpwave.workbench.model.roofline import (
    FLOAT32_PATHS,
    Bound,
    Path,
    Rates,
    Roofline,
    busy_share,
    byte,
    fastest,
    figure,
    roofline,
    us,
)
from warpwave.workbench.model.steps import LOSSES

FAR = 1.6  # as far as predictions of what was never measured are off in one call of ten
NOTICEABLE = 1.05  # a bound that falls by less is not worth a sentence
MOST = 3  # sentences: a reader acts on the first
FEW_BLOCKS = 4  # a SM: above this, the last one to finish costs little


@dataclass(frozen=True)
class Call:
    """All that is known of a call when advice is given.

    Attributes:
        problem, gpu: the call, and where it runs.
        kernel, config, cost: what serves it: the module, its config, and its cost.
        bounds: by the data sheet, or where there is none as measured; the kernel's own bounds included. None where
            nothing is known of the device's rates.
        launch_us: measured time of a launch, None where nobody measured it.
        mask_band: the positional mask that the boolean mask is equal to; None where it is none, or not looked at.
        layout: phrases about strides that cost something.
        prediction: of this kernel's time; None where there is no model of the card.
        alternatives_us: kernel name -> predicted time of the others that could run the call.
    """

    problem: AttentionProblem
    gpu: Gpu
    kernel: Any
    config: Any
    cost: Cost
    bounds: Roofline | None
    launch_us: float | None = None
    mask_band: Band | None = None
    layout: tuple[str, ...] = ()
    prediction: Prediction | None = None
    alternatives_us: Mapping[str, float] = field(default_factory=dict)

    def least_us(self, problem: AttentionProblem, config: Any) -> float:
        """The least time of a changed call, or of this one by another config, by the same rates."""
        assert self.bounds is not None
        cost, precision = self.kernel.cost(problem, self.gpu, config), computed_in(self.kernel, problem, self.gpu)
        return roofline(problem, self.bounds.rates, gpu=self.gpu, cost=cost, precision=precision).time_us


def computed_in(kernel: Any, problem: AttentionProblem, gpu: Gpu) -> str:
    """How a kernel computes float32 products: ours as it takes the precision, torch's in float32 unless it is tf32."""
    if kernel.NEEDS_GPU:
        return arithmetic(problem, gpu, getattr(kernel, "ABLE", PORTABLE))
    return "tf32" if problem.precision == "tf32" else "ieee"


class _Advice(NamedTuple):
    saves_us: float  # SURE for what costs nothing to change and keeps every bit of the answer
    text: str


SURE = float("inf")


def recommendations(call: Call) -> list[str]:
    """At most three sentences, the one that lowers a bound the furthest first; one that says so where nothing would."""
    if call.problem.visible_pairs == 0:
        return ["Nothing: no query sees a key, so there is no work in this call."]
    found = [*_mask(call), *_layout(call), *_other_kernel(call)]
    if call.bounds is not None and call.bounds.binding is not None and not call.gpu.is_cpu:
        found += [advice for rule in RULES for advice in rule(call, call.bounds, call.bounds.rates)]
    found.sort(key=lambda advice: -advice.saves_us)
    return [advice.text for advice in found[:MOST]] or [_nothing(call)]


# What the kernel wastes -----------------------------------------------------------------------------------------------


def _wasteful_tiles(bounds: Roofline) -> Bound | None:
    """The bound of the tiles, where it is noticeably above what the call itself needs."""
    tiles = bounds.of("tiles")
    return tiles if tiles is not None and tiles.time_us > NOTICEABLE * bounds.of_problem.time_us else None


def _grid(call: Call, bounds: Roofline, rates: Rates) -> Iterator[_Advice]:
    tiles, blocks, sms = _wasteful_tiles(bounds), call.cost.blocks, rates.num_sms
    if tiles is None or not 0 < blocks < FEW_BLOCKS * sms or not _starved(call, rates):
        return
    if blocks < sms:
        text = (
            f"The grid has {blocks} block{'s' if blocks > 1 else ''}, so {sms - blocks} of {sms} SMs have nothing to do"
        )
    else:
        text = f"{blocks} blocks on {sms} SMs: the busiest computes {-(-blocks // sms)}, the mean is {blocks / sms:.2f}"
    least = bounds.of_problem.time_us
    text += f", and {call.kernel.NAME} cannot take less than {us(bounds.time_us)} where the card could do {us(least)}."
    options = [(call.least_us(call.problem, config), config) for config in call.kernel.configs(call.problem, call.gpu)]
    best_us, config = min(options, key=lambda option: option[0])
    if best_us * NOTICEABLE < bounds.time_us:
        values = ", ".join(f"{name}={value!r}" for name, value in asdict(config).items())
        more = call.kernel.cost(call.problem, call.gpu, config).blocks
        wastes = "" if more > blocks else ", and smaller tiles waste less"
        where = f"warpwave.kernels.{call.kernel.NAME.replace('/', '.')}"
        text += f" Time Config({values}) of {where}: {more:,} blocks{wastes}, at least {us(best_us)}."
        yield _Advice(bounds.time_us - best_us, text)
    else:
        text += f" A larger batch or more heads in one call fill it{_divides_keys(call)}."
        yield _Advice(bounds.time_us - least, text)


def _divides_keys(call: Call) -> str:
    """The kernel that fills the card by dividing the keys of a head, as a phrase."""
    from warpwave import dispatch

    for kernel in dispatch.KERNELS:
        if (
            kernel is not call.kernel
            and hasattr(kernel, "choose_splits")
            and not kernel.why_not(call.problem, call.gpu)
        ):
            return f'; kernel="{kernel.NAME}" divides the keys of a head over blocks'
    return ""


def _starved(call: Call, rates: Rates) -> bool:
    """Whether the number of blocks alone leaves SMs without work for a noticeable part of the time."""
    share, _ = busy_share(call.problem, rates.num_sms, call.cost.blocks)
    return share * NOTICEABLE < 1


def _head_padding(call: Call, bounds: Roofline, rates: Rates) -> Iterator[_Advice]:
    tiles, problem, widths = _wasteful_tiles(bounds), call.problem, _computed_widths(call)
    useful, computed = problem.head_dim + problem.head_dim_v, sum(widths)
    if tiles is None or useful == computed:
        return
    saves = tiles.time_us * (1 - useful / computed)
    yield _Advice(
        saves,
        f"{call.kernel.NAME} computes head_dim {problem.head_dim} as {widths[0]}"
        + (f" and head_dim_v {problem.head_dim_v} as {widths[1]}" if problem.head_dim_v != problem.head_dim else "")
        + f": {computed} / {useful} = {computed / useful:.3g} x the products, {us(saves)} of {us(tiles.time_us)}. "
        f"A model with head_dim {widths[0] // 2} or {widths[0]} wastes none; this call cannot avoid it.",
    )


def _computed_widths(call: Call) -> tuple[int, int]:
    """The largest head sizes whose products cost the kernel no more than these: what it pads them to."""
    p = call.problem
    # Of a small call, for neither lengths nor masks have a say in it, and costs are counted tile by tile.
    small = AttentionProblem(
        batch=1,
        seqlen_q=256,
        seqlen_k=256,
        num_heads_q=1,
        num_heads_kv=1,
        head_dim=p.head_dim,
        head_dim_v=p.head_dim_v,
        dtype=p.dtype,
        softmax_scale=p.softmax_scale,
        precision=p.precision,
        error_budget=p.error_budget,
    )
    flops = call.kernel.cost(small, call.gpu, call.config).flops
    widths = (p.head_dim, p.head_dim_v)
    for side in (0, 1):
        for size in range(widths[side] + 1, widths[side] + 129):
            wider = (size, widths[1]) if side == 0 else (widths[0], size)
            changed = replace(small, head_dim=wider[0], head_dim_v=wider[1])
            if call.kernel.cost(changed, call.gpu, call.config).flops > flops:
                break
            widths = wider
    return widths


def _whole_tiles(call: Call, bounds: Roofline, rates: Rates) -> Iterator[_Advice]:
    tiles, problem = _wasteful_tiles(bounds), call.problem
    if tiles is None:
        return
    heads = sum(_computed_widths(call)) / (problem.head_dim + problem.head_dim_v)
    waste = call.cost.flops / max(1, problem.flops) / heads
    block_m, block_n = getattr(call.config, "block_m", 0), getattr(call.config, "block_n", 0)
    if waste < 1.2 or not block_m:
        return
    saves = tiles.time_us * (1 - 1 / waste)
    text = f"Tiles of {block_m} x {block_n} compute {waste:.3g} x the visible pairs, {us(saves)} of {us(tiles.time_us)}"
    if problem.seqlen_q < block_m:
        text += f": {problem.seqlen_q} of the {block_m} rows are queries."
        if problem.num_heads_q > problem.num_heads_kv:
            group = problem.num_heads_q // problem.num_heads_kv
            text += f" The {group} query heads that share a kv head could share a tile; {_shares_tiles(call)}."
        else:
            text += " More queries in one call, or a smaller block_m, waste less."
    elif problem.mask_shape is not None:
        if getattr(call.kernel, "SKIPS_HIDDEN_TILES", False):
            text += " at the most: tiles that the mask hides from a whole block are skipped, which is not counted here."
        else:
            text += ": a boolean mask spares no tile, whatever it hides."
    elif problem.has_band:
        text += ": the mask's edge cuts through them. Smaller tiles waste less and are slower for each pair: time some."
    else:
        text += ": the last of a sequence is part empty. Time a smaller block_m or block_n."
    yield _Advice(saves, text)


def _shares_tiles(call: Call) -> str:
    """The kernel that computes least of those that pack more of the call into a tile, as a phrase."""
    from warpwave import dispatch

    least, name = call.cost.flops / 1.5, ""
    for kernel in dispatch.KERNELS:
        if kernel.NEEDS_GPU and kernel is not call.kernel and not kernel.why_not(call.problem, call.gpu):
            flops = kernel.cost(call.problem, call.gpu, kernel.configs(call.problem, call.gpu)[0]).flops
            if flops < least:
                least, name = flops, kernel.NAME
    return f'kernel="{name}" does that' if name else "no kernel here does that"


def _other_kernel(call: Call) -> Iterator[_Advice]:
    """A kernel that `auto` does not take, and that would be faster by more than predictions are off."""
    if call.prediction is None or not call.alternatives_us:
        return
    name, other_us = min(call.alternatives_us.items(), key=lambda item: item[1])
    if other_us * FAR < call.prediction.time_us:
        yield _Advice(
            call.prediction.time_us - other_us,
            f'kernel="{name}" is predicted to take {us(other_us)} where {call.kernel.NAME} takes '
            f'{us(call.prediction.time_us)}; "auto" takes it for no such call, because none was measured: time both.',
        )


# What the call asks for -----------------------------------------------------------------------------------------------


def _mask(call: Call) -> Iterator[_Advice]:
    problem = call.problem
    if problem.mask_shape is None:
        return
    changed = as_positional(problem, call.mask_band)
    if changed is None and not problem.pairs_are_exact:
        skips = getattr(call.kernel, "SKIPS_HIDDEN_TILES", False)
        spared = "only tiles that it hides from a whole block of queries" if skips else "no tile"
        yield _Advice(
            0.0,
            f"The boolean mask is read in full, and spares the kernel {spared}. If it is causal or a window, say so by "
            "causal= or window_size= instead: hidden tiles are then not visited at all.",
        )
    if changed is None:
        return
    without, how = changed
    text = f"{how[0].upper()}{how[1:]}: {byte(math.prod(problem.mask_shape))} less to read"
    if not call.kernel.why_not(without, call.gpu):
        flops = call.kernel.cost(without, call.gpu, call.config).flops
        if flops < call.cost.flops:
            text += f", {flops / call.cost.flops:.3g} x the products"
        if call.bounds is not None and call.bounds.binding is not None:
            after = call.least_us(without, call.config)
            if after * NOTICEABLE < call.bounds.time_us:
                text += f", at least {us(after)} instead of {us(call.bounds.time_us)}"
    yield _Advice(SURE, f"{text}.")


def _precision(call: Call, bounds: Roofline, rates: Rates) -> Iterator[_Advice]:
    problem, binding, tiles = call.problem, bounds.binding, bounds.of("tiles")
    used = computed_in(call.kernel, problem, call.gpu)
    now = fastest(FLOAT32_PATHS[used], rates)
    if problem.dtype != "float32" or tiles is None or binding is None or now is None:
        return
    if tiles.time_us < binding.time_us:  # the work's own products may take as long
        return
    allowed = now
    for name in ("ieee", "tf32"):
        changed = replace(problem, precision=name, error_budget=None)
        taken = computed_in(call.kernel, changed, call.gpu)  # a name may be served by another arithmetic
        path = fastest(FLOAT32_PATHS[taken], rates)
        if path is None or path.useful_tflops < NOTICEABLE * allowed.useful_tflops:
            continue
        if call.kernel.why_not(changed, call.gpu) or taken == used:
            continue
        bits = ARITHMETICS[taken].significant_bits
        accuracy = "plain float32" if taken == "ieee" else f"operands of {bits} significant bits, if that is enough"
        allowed = path
        saves = tiles.time_us * (1 - now.useful_tflops / path.useful_tflops)
        yield _Advice(
            saves,
            f"Products run as {used}, {_rate(now)}; precision={name!r} ({accuracy}) allows {_rate(path)}: "
            f"{us(tiles.time_us - saves)} instead of {us(tiles.time_us)}.",
        )
    half = fastest({"bfloat16": 1}, rates) or fastest({"float16": 1}, rates)
    if half is not None and half.useful_tflops > NOTICEABLE * now.useful_tflops:
        saves = tiles.time_us * (1 - now.useful_tflops / half.useful_tflops)
        yield _Advice(
            saves / 2,  # behind what changes no dtype
            f"{half.name} inputs, if they are accurate enough, allow {_rate(half)} where {used} allows {_rate(now)}: "
            f"products of {us(tiles.time_us - saves)} instead of {us(tiles.time_us)}.",
        )


def _rate(path: Path) -> str:
    if path.products == 1:
        return f"{figure(path.tflops)} TFLOP/s"
    return f"{figure(path.tflops)} / {path.products} = {figure(path.useful_tflops)} TFLOP/s"


# What binds -----------------------------------------------------------------------------------------------------------


def _memory(call: Call, bounds: Roofline, rates: Rates) -> Iterator[_Advice]:
    binding, problem = bounds.of_problem.binding, call.problem
    products = bounds.of("tensor cores") or bounds.of("float32 units")
    if binding is None or binding.resource != "memory" or products is None or not products.time_us:
        return
    if call.launch_us is not None and binding.time_us < call.launch_us:
        return  # the launch binds
    kv = problem.keys_needed * (problem.head_dim + problem.head_dim_v) * DTYPE_BYTES[problem.dtype]
    balance = problem.intensity * binding.time_us / products.time_us
    text = f"Memory binds, and k and v are {kv / problem.compulsory_bytes:.0%} of the bytes"
    if problem.seqlen_q * 4 <= problem.seqlen_k:
        queries = int(problem.seqlen_q * binding.time_us / products.time_us)
        text += (
            f": reading them takes {us(binding.time_us)} and the products {us(products.time_us)}, so up to {queries:,} "
            f"queries a sequence in one call would take no longer than {problem.seqlen_q}"
        )
    else:
        text += (
            f". {figure(problem.intensity)} FLOP a byte are fewer than the {figure(balance)} "
            "at which products begin to bind; longer sequences have more, in proportion"
        )
    text += "."
    if problem.num_heads_q == problem.num_heads_kv > 1:
        text += " Query heads that share kv heads (GQA) divide these bytes by the size of a group."
    elif problem.dtype == "float32":
        text += f" In 16 bits they would be {byte(kv / 2)} instead of {byte(kv)}."
    yield _Advice(0.0, text)


def _exponentials(call: Call, bounds: Roofline, rates: Rates) -> Iterator[_Advice]:
    binding = bounds.of_problem.binding
    products = bounds.of("tensor cores") or bounds.of("float32 units")
    if binding is None or binding.resource != "exponentials" or products is None or not products.time_us:
        return
    width = int((call.problem.head_dim + call.problem.head_dim_v) / 2 * binding.time_us / products.time_us)
    yield _Advice(
        0.0,
        f"Exponentials bind, {us(binding.time_us)} against {us(products.time_us)} of products: each pair takes one, "
        "whatever head_dim is"
        + (f", so one up to {width} costs no more" if width > call.problem.head_dim else "")
        + ". Fewer, wider heads do the same products with fewer of them.",
    )


def _launch(call: Call, bounds: Roofline, rates: Rates) -> Iterator[_Advice]:
    work = max((bound.time_us for bound in bounds.bounds if bound.resource != "launch"), default=0.0)
    if call.launch_us is not None and work < call.launch_us:
        yield _Advice(
            call.launch_us - work,
            f"The work takes {us(work)} at the least and a launch {us(call.launch_us)} (measured): put more into one "
            "call (a larger batch, or attention_varlen), and replay a CUDA graph so that nothing waits for the host.",
        )


def _layout(call: Call) -> Iterator[_Advice]:
    for note in call.layout:
        yield _Advice(SURE, f"{note}.")


RULES: tuple[Callable[[Call, Roofline, Rates], Iterator[_Advice]], ...] = (
    _grid,
    _head_padding,
    _whole_tiles,
    _precision,
    _memory,
    _exponentials,
    _launch,
)


MORE = {"memory": "memory bandwidth", "launch": "speed in launching"}


def _nothing(call: Call) -> str:
    if call.gpu.is_cpu:
        return "Nothing about the call, on a CPU."
    if call.bounds is None or call.bounds.of_problem.binding is None:
        return "Nothing that follows without the rates of a card."
    binding = call.bounds.of_problem.binding
    if call.prediction is not None:
        factor, name = max((f, name) for name, f in call.prediction.factors.items() if name != "clocks")
        if factor > 1.2:
            return (
                "No bound falls by a change of the call. Of the time above the bound, the model lays most to "
                f"{name}, x {factor:.2f}: {LOSSES[name]}. Another config of the kernel may lose less there: "
                f"`warpwave bench` times them."
            )
    return (
        "Nothing about the call: the grid fills the card and the tiles waste little. What is left is less work (a "
        "causal mask or a window, where the model allows one), or a card with more "
        f"{MORE.get(binding.resource, binding.resource)}."
    )
