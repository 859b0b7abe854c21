"""The formulas behind the page "Plan", each with its source; the page shows them beside the figures."""

from __future__ import annotations

KV_BYTES = """**KV cache** = 2 × layers × KV heads × head size × tokens × sequences × bytes per element. 2 is
for keys and values; a sliding window stops growing at its size, a DeepSeek latent stores one
vector without the 2. Source: the model's config.json; checked for 15 models in
docs/planning.md."""
BLOCKS = """**In blocks**: ⌈tokens / block⌉ × block bytes for each group of layers (PagedAttention, Kwon et
al., SOSP 2023, section 4); a contiguous allocation would reserve the longest sequence for every
request."""
CACHE = """**Cache** = memory × utilization − weights − activation peak − context and graphs. Weights: the
checkpoint's files. Activation peak: the larger of budget × (3 × intermediate / GPUs + 3 ×
hidden) × 2 bytes and max_num_seqs × vocabulary × 40 bytes. Without a server's log an estimate,
good to about 20 % (docs/planning.md)."""
POOL = """**Tokens of cache** = blocks of the pool / blocks of one longest sequence × longest sequence:
what vLLM 0.32 prints as "KV cache size" at its start (`kv_cache_utils.py`)."""
AT_ONCE = """**None preempted**: free blocks / Σ share × blocks at final length. **On average**: the same
with ages spread evenly over the output. **Risk**: share of 20,000 seeded draws in which
max_num_seqs running requests of random class and age need more blocks than there are. A shared
prefix is held once."""
PICTURES = """**Image tokens** by the rule of the model's own image processor: tiles of equal size and one of
the whole (Idefics3, SmolVLM), or one token a cell of pixels within bounds (Qwen-VL). Tokens a
second = tokens × cameras / seconds."""
STEP = """**Step time** with a GPU = 1 ms + max(FLOP / (60 % of peak), bytes / (80 % of bandwidth)) +
image encoding (roofline: Williams, Waterman, Patterson, CACM 2009; the three numbers are
assumptions). **Fitted** = fixed + a × decode tokens + b × prefill tokens + c × context of
decodes + d × query-key pairs + e × context of prefills + f × image tokens + g × images,
coefficients ≥ 0, least squares of relative errors (the idea: Vidur, Agrawal et al., MLSys
2024)."""
SCHEDULE = """**Schedule**: vLLM 0.32's scheduler on paper, step for step the same as the engine's own for 76
loads under 19 settings (tests). prefill-first: whole prompts before any decode. decode-first:
Sarathi-Serve (Agrawal et al., OSDI 2024, algorithm 3). fixed-splits: Dynamic SplitFuse (Holmes
et al. 2024)."""
PERCENTILES = """**TTFT**: due to first token; **ITL**: every gap between two tokens; pooled per class, read at
rank q (n − 1) between neighbours. Load is open: a request is due whatever the server does."""
ROOFLINE = """**Arithmetic intensity** = FLOP of a step / bytes it moves (weights once, cache as read). FLOP =
2 × weights × tokens + 4 × layers × heads × head size × query-key pairs. Left of the ridge (peak
/ bandwidth) a step is memory- bound, right of it compute-bound (Williams, Waterman, Patterson,
CACM 2009; SARATHI, Agrawal et al. 2023, section 3)."""
ATTENTION = """**Chunked attention**: softmax(q Kᵀ / √d) V over all keys at or before the query, in pieces with
a running maximum and sum (online softmax: Milakov and Gimelshein 2018; FlashAttention, Dao et
al. 2022, section 3.1). Chunk i reads i × chunk tokens of keys and values, one pass only its
own: Σ ends − tokens are read again (SARATHI, section 4.2)."""
TIMELINE = """**Time line**: each bar is one request's part of one step of the simulated engine, as long as
the step takes. A gap between two bars of a chat is the time that its reader waits for the next
token."""
