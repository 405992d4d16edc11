"""What to change about a call, for `explain`: sentences that follow from its bounds, each with its arithmetic.

A recommendation names the bound that falls, from which value to which. If a figure depends on something that was not
measured, the sentence says what to time. No factor is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from warpwave.errors import UnsupportedProblem
from warpwave.gpu import Gpu
from warpwave.kernels.cost import Cost
from warpwave.precision import ARITHMETICS, PORTABLE, arithmetic
from warpwave.problem import DTYPE_BYTES, AttentionProblem, Band
from warpwave.workbench.explain.near_misses import as_positional, padded_to
from warpwave.workbench.model.predict import Prediction, predict
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
from warpwave.workbench.model.steps import LOSSES, OF_THE_CARD

FAR = 1.6  # predictions of unmeasured calls are off by more than this in one call of ten
NOTICEABLE = 1.05  # a bound that falls by less gets no sentence
MOST = 3  # sentences
LARGE = 1.2  # a loss by the model that gets a sentence if no bound can fall
# Losses that depend on the tiles and the grid, and so on the config.
OF_A_CONFIG = {
    "head padding", "hidden pairs", "ragged tiles", "idle SMs", "traffic", "reductions", "softmax", "conversions",
    "latency", "fill",
}  # fmt: skip
FEW_BLOCKS = 4  # per SM; with more, the last block to finish costs little


@dataclass(frozen=True)
class Call:
    """What is known about a call when advice is given.

    Attributes:
        problem, gpu: the call, and where it runs.
        kernel, config, cost: the module that serves it, its config, and its cost.
        bounds: by the data sheet, or without one as measured; includes the kernel's own bounds. None if the device's
            rates are unknown.
        launch_us: measured time of a launch; None if it was not measured.
        mask_band: the positional mask that equals the boolean mask; None if there is none, or it was not examined.
        layout: phrases about strides that cost time.
        prediction: of this kernel's time; None if there is no model of the card.
        alternatives_us: kernel name -> predicted time, for the other kernels that could run the call.
        backward: the prediction of the call's backward; None without gradients, or without a model.
        hot: whether the call before used the same tensors.
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
    backward: Prediction | None = None
    hot: bool = False

    def least_us(self, problem: AttentionProblem, config: Any) -> float:
        """Returns the lower bound of a changed call, or of this call with another config, at the same rates."""
        assert self.bounds is not None
        cost, precision = self.kernel.cost(problem, self.gpu, config), computed_in(self.kernel, problem, self.gpu)
        widens = getattr(self.kernel, "WIDENS_VALUES", False)
        return roofline(problem, self.bounds.rates, gpu=self.gpu, cost=cost, precision=precision, widens=widens).time_us

    def faster(self, problem: AttentionProblem) -> str | None:
        """Returns a phrase with the predicted times of a changed call and of this one; empty if there is no model of
        them, and None if the changed call is not predicted to be noticeably faster. A bound that falls is no reason for
        a change that makes the call slower."""
        from warpwave import dispatch

        try:
            choice = dispatch.choose(problem, self.gpu)
        except UnsupportedProblem:
            return None
        after = predict(problem, choice.kernel, choice.config, self.gpu, hot=self.hot)
        if after is None or self.prediction is None:
            return ""
        if after.time_us * NOTICEABLE >= self.prediction.time_us:
            return None
        return f"; predicted: {us(after.time_us)} instead of {us(self.prediction.time_us)}"


def computed_in(kernel: Any, problem: AttentionProblem, gpu: Gpu) -> str:
    """Returns the arithmetic of a kernel's float32 products. Kernels made of torch's operations never round them."""
    if hasattr(kernel, "arithmetic_of"):
        return str(kernel.arithmetic_of(problem, gpu))
    return arithmetic(problem, gpu, getattr(kernel, "ABLE", PORTABLE)) if kernel.NEEDS_GPU else "ieee"


class _Advice(NamedTuple):
    saves_us: float  # SURE for a change that costs nothing and keeps the result
    text: str


SURE = float("inf")


def recommendations(call: Call) -> list[str]:
    """Returns at most three sentences, the largest gain first; one sentence if no change would help."""
    if call.problem.visible_pairs == 0:
        return ["Nothing: no key is visible to any query, so this call has no work."]
    found = [*_mask(call), *_layout(call), *_other_kernel(call), *_alignment(call), *_backward(call)]
    if call.bounds is not None and call.bounds.binding is not None and not call.gpu.is_cpu:
        found += [advice for rule in RULES for advice in rule(call, call.bounds, call.bounds.rates)]
    found.sort(key=lambda advice: -advice.saves_us)
    return [advice.text for advice in found[:MOST]] or [_nothing(call)]


# What the kernel wastes -----------------------------------------------------------------------------------------------


def _wasteful_tiles(bounds: Roofline) -> Bound | None:
    """Returns the bound of the tiles if it is noticeably above the bound of the call itself."""
    tiles = bounds.of("tiles")
    return tiles if tiles is not None and tiles.time_us > NOTICEABLE * bounds.of_problem.time_us else None


def _grid(call: Call, bounds: Roofline, rates: Rates) -> Iterator[_Advice]:
    tiles, blocks, sms = _wasteful_tiles(bounds), call.cost.blocks, rates.num_sms
    if tiles is None or not 0 < blocks < FEW_BLOCKS * sms or not _starved(call, rates):
        return
    if blocks < sms:
        text = f"The grid has {blocks} block{'s' if blocks > 1 else ''}, so {sms - blocks} of {sms} SMs are idle"
    else:
        text = f"{blocks} blocks on {sms} SMs: the busiest has {-(-blocks // sms)}, the mean is {blocks / sms:.2f}"
    least = bounds.of_problem.time_us
    text += f", and {call.kernel.NAME} takes at least {us(bounds.time_us)}, while the card's bound is {us(least)}."
    if best := _better_config(call, bounds):
        best_us, config, times = best
        values = ", ".join(f"{name}={value!r}" for name, value in asdict(config).items())
        more = call.kernel.cost(call.problem, call.gpu, config).blocks
        wastes = "" if more > blocks else ", and smaller tiles waste less"
        where = f"warpwave.kernels.{call.kernel.NAME.replace('/', '.')}"
        text += f" Time Config({values}) of {where}: {more:,} blocks{wastes}, at least {us(best_us)}{times}."
        yield _Advice(bounds.time_us - best_us, text)
    else:
        text += f" A larger batch or more heads in one call fill the card{_divides_keys(call)}."
        yield _Advice(bounds.time_us - least, text)


def _better_config(call: Call, bounds: Roofline) -> tuple[float, Any, str] | None:
    """Returns the bound of the config with the shortest predicted time among those with a noticeably lower bound, the
    config, and a phrase with the predicted times. Without a model it is the config with the lowest bound. Returns None
    if no config is noticeably better by both: small tiles often lower the bound of the grid and take longer."""
    options = [(call.least_us(call.problem, config), config) for config in call.kernel.configs(call.problem, call.gpu)]
    lower = [option for option in options if option[0] * NOTICEABLE < bounds.time_us]
    if call.prediction is None:
        return (*min(lower, key=lambda option: option[0]), "") if lower else None
    now, found = call.prediction.time_us, []
    for least_us, config in lower:
        after = predict(call.problem, call.kernel, config, call.gpu, hot=call.hot)
        if after is not None and after.time_us * NOTICEABLE < now:
            found.append((after.time_us, least_us, config))
    if not found:
        return None
    after_us, least_us, config = min(found, key=lambda option: option[0])
    return least_us, config, f"; predicted: {us(after_us)} instead of {us(now)}"


def _divides_keys(call: Call) -> str:
    """Returns a phrase that names a kernel which by default splits the keys of this call over blocks, that of `auto` if
    it does; empty if none does."""
    from warpwave import dispatch

    for kernel in (dispatch.choose(call.problem, call.gpu).kernel, *dispatch.KERNELS):
        if kernel is not call.kernel and not dispatch.why_not(kernel, call.problem, call.gpu):
            first = next(iter(kernel.configs(call.problem, call.gpu)), None)
            if getattr(first, "num_splits", 1) > 1:
                return f'; kernel="{kernel.NAME}" splits the keys of a head over blocks'
    return ""


def _starved(call: Call, rates: Rates) -> bool:
    """Returns whether the number of blocks leaves SMs idle for a noticeable part of the time."""
    share, _ = busy_share(call.problem, rates.num_sms, call.cost.blocks)
    return share * NOTICEABLE < 1


def _head_padding(call: Call, bounds: Roofline, rates: Rates) -> Iterator[_Advice]:
    tiles, problem, widths = _wasteful_tiles(bounds), call.problem, _computed_widths(call)
    useful, computed = problem.head_dim + problem.head_dim_v, sum(widths)
    if tiles is None or useful == computed:
        return
    saves = tiles.time_us * (1 - useful / computed)
    apart = problem.head_dim_v != problem.head_dim or widths[1] != widths[0]
    yield _Advice(
        saves,
        f"{call.kernel.NAME} computes head_dim {problem.head_dim} as {widths[0]}"
        + (f" and head_dim_v {problem.head_dim_v} as {widths[1]}" if apart else "")
        + f": {computed} / {useful} = {computed / useful:.3g} x the products, {us(saves)} of {us(tiles.time_us)}. "
        f"A model with head_dim {widths[0]} and head_dim_v {widths[1]} has no padding.",
    )


def _computed_widths(call: Call) -> tuple[int, int]:
    """Returns the head dimensions that the kernel pads to: the largest that cost it no more products."""
    p = call.problem
    # A small call is enough, because lengths do not matter here, and costs are counted tile by tile. A mask or a bias
    # does matter: it may change how a kernel tiles columns.
    cells = (1, 1, 256, 256)
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
        dtype_v=p.dtype_v,
        dtype_out=p.dtype_out,
        descale_blocks=p.descale_blocks,
        mask_shape=None if p.mask_shape is None else cells,
        bias_shape=None if p.bias_shape is None else cells,
        bias_dtype=p.bias_dtype,
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
    shares = getattr(call.kernel, "SHARES_TILES", False)
    together = problem.heads_together if shares else getattr(call.config, "heads", 1)  # heads that share a tile
    if problem.seqlen_q * together < block_m:
        text += f": {problem.seqlen_q * together} of the {block_m} rows are queries."
        if problem.num_heads_q > problem.num_heads_kv * together:
            group = problem.num_heads_q // problem.num_heads_kv
            text += f" The {group} query heads that share a kv head could share a tile; {_shares_tiles(call)}."
        else:
            text += " More queries in one call, or a smaller block_m, waste less."
    elif problem.mask_shape is not None:
        if getattr(call.kernel, "SKIPS_HIDDEN_TILES", False):
            text += " at most: tiles that the mask hides from a whole block are skipped, which is not counted here."
        else:
            text += ": the kernel skips no tile because of a boolean mask."
    elif problem.has_band:
        text += ": the mask's edge cuts through tiles. Smaller tiles waste less but are slower per pair; time some."
    else:
        text += ": the last tile of a sequence is partly empty. Time a smaller block_m or block_n."
    yield _Advice(saves, text)


def _shares_tiles(call: Call) -> str:
    """Returns a phrase that names the kernel with the least padding in its tiles."""
    from warpwave import dispatch

    least, name = call.cost.flops / 1.5, ""
    for kernel in dispatch.KERNELS:
        if kernel.NEEDS_GPU and kernel is not call.kernel and not dispatch.why_not(kernel, call.problem, call.gpu):
            flops = kernel.cost(call.problem, call.gpu, kernel.configs(call.problem, call.gpu)[0]).flops
            if flops < least:
                least, name = flops, kernel.NAME
    return f'kernel="{name}" does that' if name else "no kernel here does that"


def _other_kernel(call: Call) -> Iterator[_Advice]:
    """Yields another kernel that is predicted to be faster by more than the usual error."""
    from warpwave import dispatch

    if call.prediction is None or not call.alternatives_us:
        return
    name, other_us = min(call.alternatives_us.items(), key=lambda item: item[1])
    if other_us * FAR < call.prediction.time_us:
        of_auto = dispatch.choose(call.problem, call.gpu).kernel.NAME
        why = '"auto" chooses it' if of_auto == name else 'No such call was measured, so "auto" does not choose it'
        yield _Advice(
            call.prediction.time_us - other_us,
            f'kernel="{name}" is predicted to take {us(other_us)} where {call.kernel.NAME} takes '
            f"{us(call.prediction.time_us)}. {why}; time both.",
        )


def _alignment(call: Call) -> Iterator[_Advice]:
    """Yields a padded head_dim if the model predicts that rows of whole 16 bytes are faster."""
    if call.layout:  # of tensors, whose strides are known
        return
    edit = padded_to(call.problem, max(1, 16 // DTYPE_BYTES[call.problem.dtype]))
    if edit is None or not (times := call.faster(edit.problem)):
        return
    yield _Advice(
        SURE,
        f"{edit.change[0].upper()}{edit.change[1:]}: rows then start at multiples of 16 bytes{times}.",
    )


def _backward(call: Call) -> Iterator[_Advice]:
    """Yields the largest loss of the backward if the backward takes longer than the forward."""
    backward, forward = call.backward, call.prediction
    if backward is None or forward is None or backward.time_us < forward.time_us:
        return
    factor, name = _largest_loss(backward)
    if factor > LARGE:
        share = backward.time_us / (backward.time_us + forward.time_us)
        yield _Advice(
            0.0,
            f"The backward ({backward.kernel}) is predicted to take {share:.0%} of the time of both passes. Its "
            f"largest loss that the card does not set is {name}, x {factor:.2f}: {LOSSES[name]}.",
        )


def _largest_loss(prediction: Prediction) -> tuple[float, str]:
    return max((factor, name) for name, factor in prediction.factors.items() if name not in OF_THE_CARD)


# What the call asks for -----------------------------------------------------------------------------------------------


def _mask(call: Call) -> Iterator[_Advice]:
    problem = call.problem
    if problem.mask_shape is None:
        return
    changed = as_positional(problem, call.mask_band)
    instead = (
        "If it is causal or a window, pass causal= or window_size= instead: the kernel then skips every hidden tile"
    )
    is_of_tokens = problem.mask_shape[2] < problem.seqlen_q or problem.mask_shape[3] < problem.seqlen_k
    if is_of_tokens:  # of keys or queries alone, which no positional mask is
        instead = "If it hides padding, attention_varlen computes the other tokens alone"
    if changed is None and not problem.pairs_are_exact and not (is_of_tokens and problem.bias_shape is not None):
        skips = getattr(call.kernel, "SKIPS_HIDDEN_TILES", False)
        skipped = "only tiles that it hides from a whole block of queries" if skips else "no tile"
        yield _Advice(0.0, f"The boolean mask is read in full, and the kernel skips {skipped}. {instead}.")
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
    if tiles.time_us < binding.time_us:
        return
    allowed = now
    for name in ("ieee", "tf32"):
        changed = replace(problem, precision=name, error_budget=None)
        taken = computed_in(call.kernel, changed, call.gpu)  # another arithmetic may serve this name
        path = fastest(FLOAT32_PATHS[taken], rates)
        if path is None or path.useful_tflops < NOTICEABLE * allowed.useful_tflops:
            continue
        if call.kernel.why_not(changed, call.gpu) or taken == used or (times := call.faster(changed)) is None:
            continue
        bits = ARITHMETICS[taken].significant_bits
        accuracy = "plain float32" if taken == "ieee" else f"operands of {bits} significant bits, if that is enough"
        allowed = path
        saves = tiles.time_us * (1 - now.useful_tflops / path.useful_tflops)
        yield _Advice(
            saves,
            f"Products run as {used}, {_rate(now)}; precision={name!r} ({accuracy}) allows {_rate(path)}: "
            f"at least {us(tiles.time_us - saves)} instead of {us(tiles.time_us)}{times}.",
        )
    half = fastest({"bfloat16": 1}, rates) or fastest({"float16": 1}, rates)
    if half is None or half.useful_tflops <= NOTICEABLE * now.useful_tflops:
        return
    changed = replace(problem, dtype=half.name, precision="default", error_budget=None)
    if (times := call.faster(changed)) is not None:
        saves = tiles.time_us * (1 - now.useful_tflops / half.useful_tflops)
        yield _Advice(
            saves / 2,  # ranks after changes that keep the dtype
            f"{half.name} inputs, if they are accurate enough, allow {_rate(half)} where {used} allows {_rate(now)}: "
            f"products of at least {us(tiles.time_us - saves)} instead of {us(tiles.time_us)}{times}.",
        )


def _float16(call: Call, bounds: Roofline, rates: Rates) -> Iterator[_Advice]:
    """Yields float16 on a card that has matrix instructions for it and none for bfloat16."""
    half = fastest({"float16": 1}, rates)
    if call.problem.dtype != "bfloat16" or "bfloat16" in rates.product_tflops or half is None:
        return
    changed, least = replace(call.problem, dtype="float16"), bounds.of_problem.time_us
    after = roofline(changed, rates, gpu=call.gpu, hot=call.hot).of_problem.time_us
    if after * NOTICEABLE < least and (times := call.faster(changed)) is not None:
        yield _Advice(
            least - after,
            f"{rates.device} has no matrix instructions for bfloat16. float16 inputs, if their range is enough, allow "
            f"{_rate(half)}: at least {us(after)} instead of {us(least)}{times}.",
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
    tiles = bounds.of("tiles")
    if tiles is not None and tiles.time_us > binding.time_us:
        return  # the kernel's own products take longer
    kv = problem.keys_needed * problem.bytes_of_key
    balance = problem.intensity * binding.time_us / products.time_us
    text = f"Memory binds, and k and v are {kv / problem.compulsory_bytes:.0%} of the bytes"
    if problem.seqlen_q * 4 <= problem.seqlen_k:
        queries = int(problem.seqlen_q * binding.time_us / products.time_us)
        text += f": reading them takes {us(binding.time_us)} and the products {us(products.time_us)}"
        if queries > problem.seqlen_q:
            text += f", so up to {queries:,} queries per sequence in one call would take no longer than "
            text += f"{problem.seqlen_q:,}"
    else:
        text += (
            f". The call has {figure(problem.intensity)} FLOP per byte; products bind from {figure(balance)} on, which "
        )
        # Under a window, each query sees as many keys in a longer sequence.
        windowed = problem.window_size != (-1, -1)
        text += "longer sequences do not reach under a window" if windowed else "longer sequences reach"
    text += "."
    if problem.num_heads_q == problem.num_heads_kv > 1:
        text += " Query heads that share kv heads (GQA) divide these bytes by the group size."
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
        f"Exponentials bind, {us(binding.time_us)} against {us(products.time_us)} of products: each pair needs one, "
        "for any head_dim"
        + (f", so a head_dim up to {width} costs no more" if width > call.problem.head_dim else "")
        + ". Fewer, wider heads need fewer exponentials for the same products.",
    )


def _launch(call: Call, bounds: Roofline, rates: Rates) -> Iterator[_Advice]:
    work = max((bound.time_us for bound in bounds.bounds if bound.resource != "launch"), default=0.0)
    if call.launch_us is not None and work < call.launch_us:
        yield _Advice(
            call.launch_us - work,
            f"The work takes at least {us(work)}, and a launch takes {us(call.launch_us)} (measured): put more "
            "work into one call (a larger batch, or attention_varlen), and replay a CUDA graph to avoid host time.",
        )


def _layout(call: Call) -> Iterator[_Advice]:
    for note in call.layout:
        yield _Advice(SURE, f"{note}.")


RULES: tuple[Callable[[Call, Roofline, Rates], Iterator[_Advice]], ...] = (
    _grid,
    _head_padding,
    _whole_tiles,
    _precision,
    _float16,
    _memory,
    _exponentials,
    _launch,
)


MORE = {"memory": "memory bandwidth", "exponentials": "special function units", "launch": "speed in launching"}


def _nothing(call: Call) -> str:
    if call.gpu.is_cpu:
        return "As long as it runs on a CPU, no change of the call is known to help."
    if call.bounds is None or call.bounds.of_problem.binding is None:
        return "Nothing: the rates of the card are unknown."
    binding = call.bounds.of_problem.binding
    if call.prediction is not None:
        factor, name = _largest_loss(call.prediction)
        if factor > LARGE:
            return (
                "No change of the call lowers a bound. By the model, the largest loss that the card does not set is "
                f"{name}, x {factor:.2f}: {LOSSES[name]}.{_other_configs(call, name)}"
            )
    hides = "a narrower window" if call.problem.window_size != (-1, -1) else "a window"
    hides = hides if call.problem.has_band else "a causal mask or a window"
    return (
        "Nothing about the call: the grid fills the card, and the tiles waste little. What remains is less work "
        f"({hides}, if the model allows one), or a card with more {MORE.get(binding.resource, binding.resource)}."
    )


def _other_configs(call: Call, loss: str) -> str:
    """Returns how to time other configs of the kernel; empty if it has none, or if a config cannot change the loss."""
    if loss not in OF_A_CONFIG or not call.kernel.NEEDS_GPU or len(call.kernel.configs(call.problem, call.gpu)) < 2:
        return ""
    name = call.kernel.NAME
    where = f"warpwave.kernels.{name.replace('/', '.')}"
    return f' Another config may lose less: time some with kernel="{name}" and config={where}.Config(...).'
