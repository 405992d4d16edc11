"""The schema of a record file's lines, shared by reading, appending and resuming.

The ranges allow any measurement, and keep every figure that is computed from one finite.
"""

from __future__ import annotations

from typing import Any, get_args

from warpwave.checks.problems import check_problem
from warpwave.errors import InvalidInput, InvalidType
from warpwave.problem import PRECISIONS, QUANTIZED_DTYPES, AttentionProblem, Causal
from warpwave.workbench.bench.environment_schema import BYTES, COUNT, ENVIRONMENT, READING, WORD
from warpwave.workbench.bench.meters import MODES, Method
from warpwave.workbench.limits import MOST_TOKENS, check_size
from warpwave.workbench.schema import (
    Anything,
    Flag,
    Integer,
    ListOf,
    MapOf,
    Mismatch,
    Number,
    OneOf,
    OrNone,
    Table,
    Text,
)

READABLE_VERSIONS = (1, 2)

NAME, REMARK = Text(500, 1), Text(20_000)
SIZE = Integer(0, MOST_TOKENS)
ERROR = Number(0, 1e39)  # the largest error of a float32 output
SCALE = Number(0, 3.5e38)  # float32's range
DTYPE = OneOf(("float16", "bfloat16", "float32"))
ANY_DTYPE = OneOf(("float16", "bfloat16", "float32", *QUANTIZED_DTYPES))
WINDOW = ListOf(Integer(-1, MOST_TOKENS), 2, 2)
PAGE_SIZE = Integer(0, 1 << 30)
BUDGET = Number(1e-30, 1)
DROPOUT = Number(0, 1)
MICROSECONDS = Number(1e-6, 1e12)  # from far below a clock's resolution to eleven days
FACTOR = Number(1e-6, 1e6)
MOST_ROUNDS = 1000  # a comparison of two runs uses all pairs of samples

# Measurements ---------------------------------------------------------------------------------------------------------

PROBLEM = Table(
    required={
        "batch": SIZE,
        "seqlen_q": SIZE,
        "seqlen_k": SIZE,
        "num_heads_q": SIZE,
        "num_heads_kv": SIZE,
        "head_dim": SIZE,
        "head_dim_v": SIZE,
        "dtype": ANY_DTYPE,
        "softmax_scale": SCALE,
        "causal": OrNone(Table(required={"alignment": OneOf(("bottom_right", "top_left"))})),
    },
    optional={
        "window_size": WINDOW,
        "mask_shape": OrNone(ListOf(SIZE, 4, 4)),
        "bias_shape": OrNone(ListOf(SIZE, 4, 4)),
        "bias_dtype": OrNone(DTYPE),
        "alibi_shape": OrNone(ListOf(SIZE, 1, 2)),
        "softcap": SCALE,
        "has_sinks": Flag(),
        "precision": OneOf(tuple(PRECISIONS)),
        "packed": Flag(),
        "total_q": SIZE,
        "total_k": SIZE,
        "lengths": OrNone(ListOf(ListOf(SIZE, 2, 2), 0, 1_000_000)),
        "mask_visible_pairs": OrNone(Integer(0, 1 << 80)),
        "return_lse": Flag(),
        "requires_grad": Flag(),
        "page_size": PAGE_SIZE,
        "batch_invariant": Flag(),
        "error_budget": OrNone(BUDGET),
        "dropout_p": DROPOUT,
        "deterministic": Flag(),
        "dtype_v": OrNone(ANY_DTYPE),
        "dtype_out": OrNone(ANY_DTYPE),
        "descale_blocks": OrNone(ListOf(Integer(0, 128), 3, 3)),
        "dtype_kv": OrNone(OneOf(("float8_e4m3fn", "int8"))),
        "kv_factors": OrNone(OneOf(("head", "token"))),
        "v_in_k": Flag(),
    },
)
VERDICT = Table(
    required={
        "passed": Flag(),
        "reason": REMARK,
        "rms_error": OrNone(ERROR),
        "max_error": OrNone(ERROR),
        "model_rms_error": ERROR,
        "model_max_error": ERROR,
        "rows": Integer(0, 1 << 40),
    }
)
SAMPLES = Table(
    required={
        "samples_us": ListOf(MICROSECONDS, 1, MOST_ROUNDS),
        "method": OneOf(get_args(Method)),
        "repeats": COUNT,
        "calls_per_repeat": COUNT,
        "l2_flushed": Flag(),
    },
    optional={"input_sets": COUNT, "median_us": Anything()},
)


class Setting:
    """A field of a kernel's config: a switch, a whole number or a word, or null."""

    WHOLE = Integer(-(1 << 53), 1 << 53)

    def check(self, value: Any, where: str) -> None:
        if isinstance(value, str):
            WORD.check(value, where)
        elif value is not None and not isinstance(value, bool):
            self.WHOLE.check(value, where)

    def __str__(self) -> str:
        return f"a switch, a word, or {self.WHOLE}"


HEAD = {"schema_version": OneOf(READABLE_VERSIONS), "kind": OneOf(("environment", "measurement"))}
LINE = Table(required=HEAD, others=Anything())  # checked first, to report an unknown version
ENVIRONMENT_LINE = Table(required={**HEAD, "id": NAME, "environment": ENVIRONMENT})
MEASUREMENT_LINE = Table(
    required={
        **HEAD,
        "environment_id": NAME,
        "suite": WORD,
        "case": NAME,
        "problem": PROBLEM,
        "contender": NAME,
        "kernel": WORD,
        "config": OrNone(MapOf(Setting())),
        "seed": Integer(0, 1 << 63),
        "verdict": OrNone(VERDICT),
        "refusal": REMARK,
        "timing": OrNone(SAMPLES),
        "host": OrNone(SAMPLES),
        "gpu_before": OrNone(READING),
        "gpu_after": OrNone(READING),
    },
    optional={
        # Added in version 2; a record of version 1 gets the defaults.
        "mode": OneOf(MODES),
        "peak_memory_bytes": OrNone(BYTES),
        "goal": OrNone(Table(required={"ratio": OrNone(FACTOR), "over_launch_us": OrNone(FACTOR)})),
        # Derived from the samples, stored for other readers.
        "tflops": Anything(),
        "bandwidth_gbps": Anything(),
        "tokens_per_s": Anything(),
    },
)


def problem_of(data: dict[str, Any]) -> AttentionProblem:
    """Returns the problem of a record; the data must fit `PROBLEM`.

    Raises:
        Mismatch: the values are valid, but not a valid call together.
    """
    # JSON has no tuples: every list of a problem was a tuple.
    values = {key: _tuples(value) for key, value in data.items()}
    if values["causal"] is not None:
        values["causal"] = Causal(**values["causal"])
    problem = AttentionProblem(**values)
    try:
        check_problem(problem)
        check_size(problem)
    except (InvalidInput, InvalidType) as error:
        raise Mismatch(f"problem: {error}") from None
    _check_together(problem)
    return problem


def _check_together(problem: AttentionProblem) -> None:
    everything = problem.num_heads_q * sum(sq * sk * times for (sq, sk), times in problem.counted_items().items())
    if problem.mask_visible_pairs is not None and problem.mask_visible_pairs > everything:
        raise Mismatch(f"problem.mask_visible_pairs is {problem.mask_visible_pairs:,} of {everything:,} pairs")
    if problem.packed and problem.lengths is not None:
        totals = tuple(sum(side) for side in zip(*problem.lengths, strict=True)) or (0, 0)
        if len(problem.lengths) != problem.batch or (problem.total_q, problem.total_k) != totals:
            raise Mismatch(
                f"problem.lengths are of {len(problem.lengths)} sequences, {totals} tokens; the problem has "
                f"{problem.batch}, {(problem.total_q, problem.total_k)}"
            )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
