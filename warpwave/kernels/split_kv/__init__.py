"""`split_kv`: keys split over thread blocks, for decode, paged caches and prompts of few rows."""

from warpwave.kernels.split_kv.host import (Config as Config, NAME as NAME, NEEDS_GPU as NEEDS_GPU, bind as bind, bind_with_prefix as bind_with_prefix, configs as configs, cost as cost, default as default, notes as notes, outrun as outrun, smem_bytes as smem_bytes, specify as specify, why_not as why_not)
