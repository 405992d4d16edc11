"""A small language model, trained here and served to 64 requests at once from one paged cache.

    python examples/server.py                  # a GPU if there is one: some 5 million parameters, a minute of training
    python examples/server.py --device cpu     # smaller, about two minutes in all

The file shows, in this order: a decoder trained with `warpwave.attention` on text that comes with Python; a server with
continuous batching, chunked prefill, a `PagedKVCache` in which requests share the system prompt's pages, and a CUDA
graph for steps that only decode; and three checks. With both a 16-bit and an 8-bit cache, logits are compared with
those of the plain model for the same tokens. In batch-invariant float32, every token of a request served alone is
compared with the same request served among the others.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpwave import (
    AttentionProblem,
    Causal,
    OutOfPages,
    PagedKVCache,
    Rotary,
    attention,
    attention_with_kv_cache,
    warmup,
)

BYTES = 256  # the vocabulary: text is its UTF-8 bytes
SYSTEM_PROMPT = "The Python Language Reference, a topic as pydoc prints it.\n\n"
# How far an 8-bit cache may move the plain model's logits (RMS, as a share of the logits' RMS): twice what it does
# before the larger model is trained. After a minute on a CPU it was 7e-3 and 4e-3 at most, and 3e-3 by a 16-bit cache.
ALLOWED = {"float8_e4m3fn": 5e-2, "int8": 2e-2}

# The model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder and of its training batches."""

    layers: int
    width: int
    heads_q: int
    heads_kv: int
    head_dim: int
    context: int
    batch: int  # sequences of a training step

    @property
    def kv_width(self) -> int:
        return self.heads_kv * self.head_dim


SMALL = Sizes(layers=2, width=128, heads_q=4, heads_kv=2, head_dim=32, context=192, batch=6)
FULL = Sizes(layers=6, width=256, heads_q=8, heads_kv=2, head_dim=64, context=512, batch=32)

# q, k, v of tokens, (tokens..., heads, head_dim), and the layer's number -> out like q
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Decoder(nn.Module):
    """A Llama-like decoder over bytes. Attention is the only part that mixes tokens and is passed as `attend`:
    training, the plain model and the server differ only in it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = s = sizes
        self.embedding = nn.Embedding(BYTES, s.width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.RMSNorm(s.width),
                    "qkv": nn.Linear(s.width, s.heads_q * s.head_dim + 2 * s.kv_width, bias=False),
                    "out": nn.Linear(s.heads_q * s.head_dim, s.width, bias=False),
                    "norm2": nn.RMSNorm(s.width),
                    "up": nn.Linear(s.width, 4 * s.width, bias=False),
                    "down": nn.Linear(4 * s.width, s.width, bias=False),
                }
            )
            for _ in range(s.layers)
        )
        self.norm = nn.RMSNorm(s.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (2 * s.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, ids: Tensor, attend: Attend) -> Tensor:
        """Returns the hidden states of the last layer, (*ids.shape, width)."""
        s, x = self.sizes, self.embedding(ids)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, nn.ModuleDict)
            widths = (s.heads_q * s.head_dim, s.kv_width, s.kv_width)
            q, k, v = (t.unflatten(-1, (-1, s.head_dim)) for t in layer["qkv"](layer["norm"](x)).split(widths, dim=-1))
            x = x + layer["out"](attend(q, k, v, i).flatten(-2))
            x = x + layer["down"](F.silu(layer["up"](layer["norm2"](x))))
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of the next byte; the output layer shares the embedding's weights."""
        return hidden @ self.embedding.weight.T


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """Returns x, (batch, seqlen, heads, head_dim), rotated to positions 0, 1, ... as calls on a cache rotate it."""
    cos, sin = (table[: x.shape[1], None] for table in (rotary.cos, rotary.sin))  # [seqlen, 1, head_dim / 2]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def plain_attention(rotary: Rotary) -> Attend:
    """Returns causal attention over whole sequences, (batch, seqlen, heads, head_dim), differentiable, without a
    cache."""

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        out: Tensor = attention(rotated(q, rotary), rotated(k, rotary), v, causal=True)
        return out

    return attend


def train(model: Decoder, text: Tensor, seconds: float, rotary: Rotary) -> None:
    """Trains with AdamW for `seconds`; the learning rate falls to zero over that time."""
    s, device = model.sizes, text.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    g = torch.Generator().manual_seed(0)
    attend, step, tokens, loss = plain_attention(rotary), 0, 0, torch.zeros(())
    start = time.monotonic()
    while (spent := time.monotonic() - start) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - spent / seconds)
        first = torch.randint(0, len(text) - s.context - 1, (s.batch, 1), generator=g).to(device)
        window = text[first + torch.arange(s.context + 1, device=device)]
        logits = model.logits(model(window[:, :-1], attend))
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, tokens = step + 1, tokens + s.batch * s.context
        if step in (1, 10) or step % 100 == 0:
            print(f"  step {step:5d}, {spent:4.0f} s: {loss.item() / 0.6931:.2f} bits a byte")
    print(f"  {step} steps, {tokens:,} bytes read, {loss.item() / 0.6931:.2f} bits a byte at the end")


def corpus() -> bytes:
    """Returns the language reference that pydoc prints; every Python comes with it."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()


# The server -----------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """A request and its progress.

    Attributes:
        prompt: bytes to continue, after the system prompt.
        wanted: number of bytes to generate.
        generated: bytes generated so far.
        row: the request's row of the cache while it runs.
        cached: number of tokens of prompt and answer in the cache.
    """

    prompt: list[int]
    wanted: int
    generated: list[int] = field(default_factory=list)
    row: int = -1
    cached: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def done(self) -> bool:
        return len(self.generated) == self.wanted


def new_cache(
    model: Decoder, rotary: Rotary, num_pages: int, max_batch: int, dtype: torch.dtype | None
) -> PagedKVCache:
    """Returns a cache for the model's layers, by default in the model's dtype."""
    s, weight = model.sizes, model.embedding.weight
    return PagedKVCache(
        num_pages=num_pages, page_size=16, num_heads_kv=s.heads_kv, head_dim=s.head_dim, num_layers=s.layers,
        max_batch=max_batch, max_seqlen=len(rotary.cos), dtype=dtype or weight.dtype, device=weight.device,
    )  # fmt: skip


class Server:
    """A server with continuous batching: the packed batch of a step has one token of every sequence that decodes, and
    prompt tokens of new sequences up to the budget."""

    def __init__(
        self, model: Decoder, rotary: Rotary, num_pages: int, max_batch: int, budget: int = 512,
        invariant: bool = False, cache_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.model, self.rotary, self.budget, self.invariant = model, rotary, budget, invariant
        self.cache = new_cache(model, rotary, num_pages, max_batch + 2, cache_dtype)
        self.max_batch = max_batch
        self.decode: DecodeGraph | None = None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted = self.steps = 0
        # The system prompt is attended to once; every request begins as a fork of it.
        self.system = self.cache.add()
        self._step_on([(self.system, list(SYSTEM_PROMPT.encode()))])
        if self.cache.device.type == "cuda" and not invariant:
            self.decode = DecodeGraph(self, self.cache.add())

    def serve(self, requests: list[Request]) -> None:
        """Runs until all requests are answered."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Admits requests and runs one batch through the model."""
        while self.waiting and len(self.running) < self.max_batch and self._has_room_for(self.waiting[0]):
            request = self.waiting.popleft()
            request.row, request.cached = self.cache.fork(self.system), 0
            self.running.append(request)
        work, left = [], self.budget
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.cached):  # those that decode first
            new = request.tokens[request.cached : request.cached + max(0, left)]
            left -= len(new)
            if new:
                work.append((request, new))
        while True:
            try:
                logits = self._step_on([(request.row, new) for request, new in work])
                break
            except OutOfPages:
                # The cache is unchanged. The youngest request goes back to the queue, and its pages are freed.
                youngest = self.running.pop()
                self.cache.free(youngest.row)
                self.waiting.appendleft(youngest)
                self.preempted += 1
                work = [(request, new) for request, new in work if request is not youngest]
                if not work:
                    raise
        for (request, new), token in zip(work, logits.argmax(-1).tolist(), strict=True):
            request.cached += len(new)
            if request.cached == len(request.tokens):
                request.generated.append(token)
                if request.done:
                    self.cache.free(request.row)
                    self.running.remove(request)

    def _has_room_for(self, request: Request) -> bool:
        """Returns whether the prompt fits, with a page left for each running request to grow."""
        needed = -(-len(request.tokens) // self.cache.page_size) + 1
        return not self.running or self.cache.num_free_pages - needed >= len(self.running)

    @torch.no_grad()
    def _step_on(self, work: list[tuple[int, list[int]]]) -> Tensor:
        """Returns the logits after the last new token of each row."""
        rows, counts = [row for row, _ in work], [len(new) for _, new in work]
        self.cache.extend(rows, counts)
        if self.decode is not None and max(counts) == 1:
            self.steps += 1
            return self.decode.replay(rows, [new[0] for _, new in work])
        device = self.cache.device
        index = self.cache.index(rows)
        ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device)
        ids = torch.tensor([token for _, new in work for token in new]).to(device)

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            out: Tensor = attention_with_kv_cache(
                q, self.cache.layers[layer], rows=index, k_new=k, v_new=v, rotary=self.rotary, cu_seqlens_q=ends,
                # A power of two, so that a few plans serve every batch.
                max_seqlen_q=1 << (max(counts) - 1).bit_length(), causal=True, batch_invariant=self.invariant,
            )  # fmt: skip
            return out

        hidden = self.model(ids, attend)
        self.steps += 1
        return self.model.logits(hidden[ends[1:].long() - 1])


class DecodeGraph:
    """A step in which every sequence decodes, captured once as a CUDA graph: each replay is one launch instead of about
    a hundred. Lengths and page tables keep their addresses; the rows that take part and their tokens are written before
    each replay. Unused places hold the row `idle`, which stays empty."""

    def __init__(self, server: Server, idle: int) -> None:
        device = server.cache.device
        self.idle, self.server = idle, server
        self.ids = torch.zeros(server.max_batch, dtype=torch.int64, device=device)
        self.rows = torch.full((server.max_batch,), idle, dtype=torch.int32, device=device)
        self._step()  # compiles, and takes what cuBLAS takes once
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._step()

    @torch.no_grad()
    def _step(self) -> Tensor:
        server = self.server

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            q, k, v = (t.unsqueeze(1) for t in (q, k, v))
            out: Tensor = attention_with_kv_cache(
                q, server.cache.layers[layer], rows=self.rows, k_new=k, v_new=v, rotary=server.rotary
            )
            return out.squeeze(1)

        return server.model.logits(server.model(self.ids, attend))

    def replay(self, rows: list[int], tokens: list[int]) -> Tensor:
        """Returns the logits after one new token of each row."""
        free = len(self.rows) - len(rows)
        self.rows.copy_(torch.tensor(rows + free * [self.idle], dtype=torch.int32))
        self.ids[: len(tokens)].copy_(torch.tensor(tokens))
        self.graph.replay()
        return self.logits[: len(rows)]


def compile_ahead(server: Server) -> None:
    """Compiles the kernels for all batches before the first request."""
    s, longest, layer = server.model.sizes, server.cache.max_seqlen, server.cache.layers[0]
    in_8_bits = layer.k_descale is not None
    warmup(
        [
            AttentionProblem(
                batch=batch, seqlen_q=1 << power, seqlen_k=longest, num_heads_q=s.heads_q, num_heads_kv=s.heads_kv,
                head_dim=s.head_dim, head_dim_v=s.head_dim, dtype=str(server.model.embedding.weight.dtype)[6:],
                softmax_scale=s.head_dim**-0.5, causal=Causal(), packed=True, total_q=batch << power,
                total_k=batch * longest, page_size=server.cache.page_size, batch_invariant=server.invariant,
                dtype_kv=str(layer.k.dtype)[6:] if in_8_bits else None, kv_factors="token" if in_8_bits else None,
            )
            for batch in (1, server.max_batch)
            for power in range(server.budget.bit_length())
        ],
        server.cache.device,
    )  # fmt: skip


# The checks -----------------------------------------------------------------------------------------------------------


def cached_attention(cache: PagedKVCache, length: int, rotary: Rotary) -> Attend:
    """Returns causal attention for one sequence, (1, length, heads, head_dim), in a new row of the cache. It reads all
    keys and values from the cache."""
    rows = [cache.add()]
    cache.extend(rows, [length])
    index = cache.index(rows)

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        out: Tensor = attention_with_kv_cache(
            q, cache.layers[layer], rows=index, k_new=k, v_new=v, rotary=rotary, causal=True
        )
        return out

    return attend


@torch.no_grad()
def teacher_forced(model: Decoder, request: Request, rotary: Rotary, cache_dtype: torch.dtype | None = None) -> Tensor:
    """Returns the plain model's logits for each token that the server generated, (generated, BYTES), with a cache if
    `cache_dtype` is given."""
    system = list(SYSTEM_PROMPT.encode())
    ids = torch.tensor([system + request.tokens[:-1]], device=model.embedding.weight.device)
    attend = plain_attention(rotary)
    if cache_dtype is not None:
        length = ids.shape[1]
        attend = cached_attention(new_cache(model, rotary, -(-length // 16), 1, cache_dtype), length, rotary)
    hidden = model(ids, attend)
    return model.logits(hidden[0, len(system) + len(request.prompt) - 1 :])


def worst_regret(model: Decoder, requests: list[Request], rotary: Rotary) -> float:
    """Returns the largest difference between the plain model's best logit and its logit of the server's token."""
    worst = 0.0
    for request in requests:
        logits = teacher_forced(model, request, rotary).float()
        chosen = logits.gather(1, torch.tensor(request.generated, device=logits.device)[:, None])[:, 0]
        worst = max(worst, (logits.amax(-1) - chosen).max().item())
    return worst


def moved_logits(model: Decoder, requests: list[Request], rotary: Rotary, cache_dtype: torch.dtype) -> float:
    """Returns how far a cache moves the plain model's teacher-forced logits: the RMS of the change over all generated
    tokens, as a share of the RMS of the logits. Means over the vocabulary are subtracted first, because softmax ignores
    them."""
    moved = own = 0.0
    for request in requests:
        plain, by_cache = (teacher_forced(model, request, rotary, dtype).float() for dtype in (None, cache_dtype))
        moved += (by_cache - plain).var(-1, correction=0).sum().item()
        own += plain.var(-1, correction=0).sum().item()
    return (moved / own) ** 0.5


def same_alone(
    model: Decoder, requests: list[Request], rotary: Rotary, num_pages: int, how_many: int
) -> tuple[int, int]:
    """Serves requests alone and together, batch-invariant; returns the tokens compared and those that differ."""
    among = [replace(r, generated=[]) for r in requests]
    Server(model, rotary, num_pages, len(requests), invariant=True).serve(among)
    compared = different = 0
    for request in among[:: max(1, len(among) // how_many)]:
        alone = replace(request, generated=[])
        Server(model, rotary, num_pages, 1, invariant=True).serve([alone])
        compared += len(alone.generated)
        different += sum(a != b for a, b in zip(alone.generated, request.generated, strict=True))
    return compared, different


def in_bfloat16(model: Decoder) -> Decoder:
    """Returns a copy of the model in bfloat16."""
    narrow = Decoder(model.sizes).to(model.embedding.weight.device, torch.bfloat16)
    narrow.load_state_dict(model.state_dict())
    return narrow


def seconds_to_serve(server: Server, requests: list[Request]) -> float:
    """Compiles ahead, serves all requests, and returns how long serving took."""
    compile_ahead(server)
    if server.cache.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.monotonic()
    server.serve(requests)
    if server.cache.device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - start


def main() -> None:
    """Trains, serves and checks; exits with code 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--device", choices=devices, default=devices[0])
    parser.add_argument("--requests", type=int, default=64, help="number of requests, all submitted at once")
    parser.add_argument("--tokens", type=int, default=0, help="tokens per request; 0: 48 on a CPU, else 256")
    parser.add_argument("--train-seconds", type=float, default=60.0)
    parser.add_argument("--cache", choices=ALLOWED, default="float8_e4m3fn", help="dtype of the second cache")
    arguments = parser.parse_args()
    if arguments.requests < 1 or arguments.tokens < 0 or arguments.train_seconds <= 0:
        parser.error("--requests and --train-seconds must be above 0, --tokens not below")
    device = torch.device(arguments.device)
    sizes = FULL if device.type == "cuda" else SMALL
    wanted = arguments.tokens or (256 if device.type == "cuda" else 48)
    torch.manual_seed(0)
    model = Decoder(sizes).to(device)
    prompt_bytes = 96
    longest = len(SYSTEM_PROMPT) + prompt_bytes + wanted
    rotary = Rotary.of(sizes.head_dim, max(longest, sizes.context), device=device)
    text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8).long().to(device)

    print(f"training {sum(p.numel() for p in model.parameters()):,} parameters on {len(text):,} bytes of text")
    train(model, text, arguments.train_seconds, rotary)
    model.eval()

    g = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(text) - prompt_bytes, (arguments.requests,), generator=g).tolist()
    lengths = torch.randint(8, prompt_bytes, (arguments.requests,), generator=g).tolist()
    requests = [Request(text[a : a + n].tolist(), wanted) for a, n in zip(starts, lengths, strict=True)]
    # Pages for three quarters of the requests at their full lengths: some requests will have to wait.
    num_pages = max(16, (3 * arguments.requests // 4 + 1) * -(-longest // 16))

    narrow = in_bfloat16(model)
    served = model if device.type == "cpu" else narrow
    server = Server(served, rotary, num_pages, arguments.requests)
    took = seconds_to_serve(server, requests)
    total = sum(len(r.generated) for r in requests)
    print(
        f"\nserved {len(requests)} requests in {took:.1f} s, {total:,} tokens, {total / took:,.0f} tokens a second, "
        f"{server.steps} steps, {server.preempted} preemptions; {server.cache.num_free_pages} of {num_pages} pages free"
    )
    print(f"the first answer, after {bytes(requests[0].prompt)[-40:]!r}:\n  {bytes(requests[0].generated)!r}")

    cache_dtype = getattr(torch, arguments.cache)
    again = Server(narrow, rotary, num_pages, arguments.requests, cache_dtype=cache_dtype)
    took = seconds_to_serve(again, [replace(request, generated=[]) for request in requests])
    by_16_bits, by_8_bits = (moved_logits(narrow, requests, rotary, dtype) for dtype in (torch.bfloat16, cache_dtype))
    print(
        f"with a cache of {arguments.cache}: {took:.1f} s, {total / took:,.0f} tokens a second; teacher-forced, it "
        f"moves logits by {by_8_bits:.1e} of their RMS, a cache of bfloat16 by {by_16_bits:.1e}; "
        f"{ALLOWED[arguments.cache]} is allowed"
    )

    regret = worst_regret(served, requests, rotary)
    # The server and the plain model sum in different orders. In bfloat16, rounding alone moves a logit of 16 by 1/16.
    allowed = 1e-3 if device.type == "cpu" else 0.5
    print(
        f"teacher-forced: the token chosen is at most {regret:.2g} below the plain model's best; {allowed} is allowed"
    )
    compared, different = same_alone(model, requests, rotary, num_pages, how_many=8)
    print(f"batch-invariant float32: {compared - different} of {compared} tokens are equal alone and among all")
    if (
        regret > allowed
        or not by_8_bits <= ALLOWED[arguments.cache]
        or different
        or server.cache.num_free_pages + len(server.cache.pages(server.system)) != num_pages
    ):
        raise SystemExit("FAILED: see above")


if __name__ == "__main__":
    main()
