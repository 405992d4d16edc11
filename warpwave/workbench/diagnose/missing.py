"""Facts that a table does not state, and the rules that could not be applied without them."""

from __future__ import annotations

from warpwave.workbench.diagnose.busy import own_groups
from warpwave.workbench.diagnose.facts import blocks, time_us, work
from warpwave.workbench.diagnose.parse import Document


def missing(document: Document) -> dict[str, str]:
    """Returns what is not stated -> the rules that need it; empty if every rule had its inputs."""
    rows = [row for _, of_series in own_groups(document) for row in of_series]
    device, found = document.device, dict[str, str]()
    lacks = {
        "seqlen": any(row.call.seqlen is None for row in rows),
        "heads": any(row.call.heads is None for row in rows),
        "head_dim": any(row.call.head_dim is None for row in rows),
    }
    sizes = [name for name, lacking in lacks.items() if lacking]
    timed = [row for row in rows if time_us(row)]
    if not timed:
        found["times (time_ms, time_us)"] = "all rules about speed"
    if sizes:
        silent = ["working set against the caches"]
        if any(work(row) is None for row in timed):
            silent = ["shares of the units' rates", "latency", *silent]
            sizes.append("tflops")
        found[", ".join(sizes)] = ", ".join(silent)
    if device.num_sms is None:
        found["the card (--gpu)"] = "thread blocks against SMs, shares of rates and bandwidth, caches"
    elif not device.tflops or device.bandwidth_gbps is None:
        found["the card's rates ([device])"] = "shares of the units' rates and of the bandwidth"
    if any(blocks(row) is None for row in rows):
        found["blocks, or block_m and heads"] = "thread blocks against SMs, waves, how often each key is read"
    if any(row.kernel.threads is None for row in rows):
        found["threads"] = "idle threads, warps on an SM"
    if any(row.kernel.smem_bytes is None for row in rows):
        found["smem_bytes"] = "blocks that an SM holds at once, shared memory used"
    return found
