"""Triton's side of kernels/triton/ops.py: attention over packed documents, and the softmax of the output head.

Imported only where they are called. On a CPU `TRITON_INTERPRET=1`, set before the first import, runs them for tests.
"""

import triton
import triton.language as tl

# Scores are kept in units of log2: exp2 is what the hardware has.
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(base, first, count, stride, total, size: tl.constexpr, wide: tl.constexpr, rest: tl.constexpr):
    """[count, wide] values of positions from `first` on, and the dimensions past `wide`, [count, rest]; 0 where there
    is no position or no dimension. With no rest the first part twice."""
    low = _part(base, first, count, stride, total, size, wide)
    high = low
    if rest > 0:
        high = _part(base + wide, first, count, stride, total, size - wide, rest)
    return low, high


@triton.jit
def _part(base, first, count, stride, total, size: tl.constexpr, wide: tl.constexpr):
    offset_N = first + tl.arange(0, count)
    offset_K = tl.arange(0, wide)
    mask = offset_N[:, None] < total
    if wide > size:
        mask = mask & (offset_K[None, :] < size)
    return tl.load(base + offset_N[:, None] * stride + offset_K[None, :], mask=mask, other=0.0)


@triton.jit
def _put(base, low, high, first, count, stride, total, size: tl.constexpr, wide: tl.constexpr, rest: tl.constexpr):
    _put_part(base, low, first, count, stride, total, size, wide)
    if rest > 0:
        _put_part(base + wide, high, first, count, stride, total, size - wide, rest)


@triton.jit
def _put_part(base, value, first, count, stride, total, size: tl.constexpr, wide: tl.constexpr):
    offset_N = first + tl.arange(0, count)
    offset_K = tl.arange(0, wide)
    mask = offset_N[:, None] < total
    if wide > size:
        mask = mask & (offset_K[None, :] < size)
    tl.store(base + offset_N[:, None] * stride + offset_K[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _scores(low_MK, high_MR, low_NK, high_NR, rest: tl.constexpr):
    """x y^T, [M, N], of rows in two parts, [., K] and [., R]."""
    score_MN = tl.dot(low_MK, tl.trans(low_NK))
    if rest > 0:
        score_MN = tl.dot(high_MR, tl.trans(high_NR), score_MN)
    return score_MN


@triton.jit
def _add_weighted(weight_MN, low_NK, high_NR, sum_MK, sum_MR, rest: tl.constexpr):
    """Sums of rows, weighted, added to what there is."""
    weight_MN = weight_MN.to(low_NK.dtype)
    sum_MK = tl.dot(weight_MN, low_NK, sum_MK)
    if rest > 0:
        sum_MR = tl.dot(weight_MN, high_NR, sum_MR)
    return sum_MK, sum_MR


@triton.jit
def attention_forward(
    q, k, v, out, norm, first,
    q_row, q_token, k_row, k_token, v_row, v_token,
    num_tokens, num_attention_heads, scale,
    repeats: tl.constexpr, size: tl.constexpr, wide: tl.constexpr, rest: tl.constexpr,
    queries: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head. out [B, T, H, K] contiguous; norm [B, H, T]: log2 of the softmax's sum."""
    tile, row, head = tl.program_id(0), tl.program_id(2), tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tile  # the longest first
    place = tile * queries
    group = head // repeats
    row_long = row.to(tl.int64)
    q += row_long * q_row + head * size
    k += row_long * k_row + group * size
    v += row_long * v_row + group * size
    first += row_long * num_tokens
    offset_M = place + tl.arange(0, queries)
    first_M = tl.load(first + offset_M, mask=offset_M < num_tokens, other=num_tokens)
    q_MK, q_MR = _rows(q, place, queries, q_token, num_tokens, size, wide, rest)
    start = tl.load(first + place) // keys * keys
    stop = tl.minimum(place + queries, num_tokens)
    top_M = tl.full([queries], float("-inf"), tl.float32)
    sum_M = tl.zeros([queries], tl.float32)
    out_MK = tl.zeros([queries, wide], tl.float32)
    out_MR = tl.zeros([queries, rest if rest > 0 else 16], tl.float32)
    factor = scale * LOG2_E
    for key in range(start, stop, keys):
        k_NK, k_NR = _rows(k, key, keys, k_token, num_tokens, size, wide, rest)
        score_MN = _scores(q_MK, q_MR, k_NK, k_NR, rest) * factor
        offset_N = key + tl.arange(0, keys)
        seen_MN = (offset_N[None, :] <= offset_M[:, None]) & (offset_N[None, :] >= first_M[:, None])
        score_MN = tl.where(seen_MN, score_MN, float("-inf"))
        higher_M = tl.maximum(top_M, tl.max(score_MN, 1))
        safe_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)  # a query that has seen nothing yet
        prob_MN = tl.exp2(score_MN - safe_M[:, None])
        shrink_M = tl.exp2(top_M - safe_M)
        sum_M = sum_M * shrink_M + tl.sum(prob_MN, 1)
        v_NK, v_NR = _rows(v, key, keys, v_token, num_tokens, size, wide, rest)
        out_MK, out_MR = _add_weighted(
            prob_MN, v_NK, v_NR, out_MK * shrink_M[:, None], out_MR * shrink_M[:, None], rest
        )
        top_M = higher_M
    sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)  # positions past the row's end
    out += (row_long * num_tokens * num_attention_heads + head) * size
    out_MK, out_MR = out_MK / sum_M[:, None], out_MR / sum_M[:, None]
    _put(out, out_MK, out_MR, place, queries, num_attention_heads * size, num_tokens, size, wide, rest)
    tl.store(
        norm + (row_long * num_attention_heads + head) * num_tokens + offset_M,
        top_M + tl.log2(sum_M),
        mask=offset_M < num_tokens,
    )


@triton.jit
def attention_queries(
    q, k, v, out, upstream, norm, delta, grad_q, first,
    q_row, q_token, k_row, k_token, v_row, v_token, up_row, up_token,
    num_tokens, num_attention_heads, scale,
    repeats: tl.constexpr, size: tl.constexpr, wide: tl.constexpr, rest: tl.constexpr,
    queries: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries, [B, T, H, K], and delta [B, H, T] = sum of out * upstream."""
    tile, row, head = tl.program_id(0), tl.program_id(2), tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tile
    place = tile * queries
    group = head // repeats
    row_long = row.to(tl.int64)
    q += row_long * q_row + head * size
    k += row_long * k_row + group * size
    v += row_long * v_row + group * size
    upstream += row_long * up_row + head * size
    at = (row_long * num_tokens * num_attention_heads + head) * size
    first += row_long * num_tokens
    beside = (row_long * num_attention_heads + head) * num_tokens
    offset_M = place + tl.arange(0, queries)
    inside_M = offset_M < num_tokens
    first_M = tl.load(first + offset_M, mask=inside_M, other=num_tokens)
    q_MK, q_MR = _rows(q, place, queries, q_token, num_tokens, size, wide, rest)
    up_MK, up_MR = _rows(upstream, place, queries, up_token, num_tokens, size, wide, rest)
    out_MK, out_MR = _rows(out + at, place, queries, num_attention_heads * size, num_tokens, size, wide, rest)
    delta_M = tl.sum(out_MK.to(tl.float32) * up_MK.to(tl.float32), 1)
    if rest > 0:
        delta_M += tl.sum(out_MR.to(tl.float32) * up_MR.to(tl.float32), 1)
    tl.store(delta + beside + offset_M, delta_M, mask=inside_M)
    norm_M = tl.load(norm + beside + offset_M, mask=inside_M, other=0.0)
    start = tl.load(first + place) // keys * keys
    stop = tl.minimum(place + queries, num_tokens)
    grad_MK = tl.zeros([queries, wide], tl.float32)
    grad_MR = tl.zeros([queries, rest if rest > 0 else 16], tl.float32)
    factor = scale * LOG2_E
    for key in range(start, stop, keys):
        k_NK, k_NR = _rows(k, key, keys, k_token, num_tokens, size, wide, rest)
        v_NK, v_NR = _rows(v, key, keys, v_token, num_tokens, size, wide, rest)
        offset_N = key + tl.arange(0, keys)
        seen_MN = (offset_N[None, :] <= offset_M[:, None]) & (offset_N[None, :] >= first_M[:, None])
        prob_MN = tl.exp2(_scores(q_MK, q_MR, k_NK, k_NR, rest) * factor - norm_M[:, None])
        prob_MN = tl.where(seen_MN, prob_MN, 0.0)
        grad_score_MN = prob_MN * (_scores(up_MK, up_MR, v_NK, v_NR, rest) - delta_M[:, None])
        grad_MK, grad_MR = _add_weighted(grad_score_MN, k_NK, k_NR, grad_MK, grad_MR, rest)
    grad_q += at
    _put(
        grad_q,
        grad_MK * scale,
        grad_MR * scale,
        place,
        queries,
        num_attention_heads * size,
        num_tokens,
        size,
        wide,
        rest,
    )


@triton.jit
def attention_keys(
    q, k, v, upstream, norm, delta, grad_k, grad_v, first, last,
    q_row, q_token, k_row, k_token, v_row, v_token, up_row, up_token,
    num_tokens, num_attention_heads, scale,
    repeats: tl.constexpr, size: tl.constexpr, wide: tl.constexpr, rest: tl.constexpr,
    queries: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and values, [B, T, G, K], summed over the query heads that look at them."""
    tile, row, group = tl.program_id(0), tl.program_id(2), tl.program_id(1)
    place = tile * keys
    row_long = row.to(tl.int64)
    num_groups = num_attention_heads // repeats
    k += row_long * k_row + group * size
    v += row_long * v_row + group * size
    first += row_long * num_tokens
    last += row_long * num_tokens
    k_NK, k_NR = _rows(k, place, keys, k_token, num_tokens, size, wide, rest)
    v_NK, v_NR = _rows(v, place, keys, v_token, num_tokens, size, wide, rest)
    offset_N = place + tl.arange(0, keys)
    start = place // queries * queries
    stop = tl.load(last + tl.minimum(place + keys, num_tokens) - 1)  # one past the last query that looks here
    grad_k_NK = tl.zeros([keys, wide], tl.float32)
    grad_v_NK = tl.zeros([keys, wide], tl.float32)
    grad_k_NR = tl.zeros([keys, rest if rest > 0 else 16], tl.float32)
    grad_v_NR = tl.zeros([keys, rest if rest > 0 else 16], tl.float32)
    factor = scale * LOG2_E
    for repeat in range(repeats):
        head = group * repeats + repeat
        q_head = q + row_long * q_row + head * size
        up_head = upstream + row_long * up_row + head * size
        beside = (row_long * num_attention_heads + head) * num_tokens
        for query in range(start, stop, queries):
            offset_M = query + tl.arange(0, queries)
            inside_M = offset_M < num_tokens
            q_MK, q_MR = _rows(q_head, query, queries, q_token, num_tokens, size, wide, rest)
            up_MK, up_MR = _rows(up_head, query, queries, up_token, num_tokens, size, wide, rest)
            first_M = tl.load(first + offset_M, mask=inside_M, other=num_tokens)
            norm_M = tl.load(norm + beside + offset_M, mask=inside_M, other=0.0)
            delta_M = tl.load(delta + beside + offset_M, mask=inside_M, other=0.0)
            seen_NM = (offset_N[:, None] <= offset_M[None, :]) & (offset_N[:, None] >= first_M[None, :])
            prob_NM = tl.exp2(_scores(k_NK, k_NR, q_MK, q_MR, rest) * factor - norm_M[None, :])
            prob_NM = tl.where(seen_NM, prob_NM, 0.0)
            grad_v_NK, grad_v_NR = _add_weighted(prob_NM, up_MK, up_MR, grad_v_NK, grad_v_NR, rest)
            grad_score_NM = prob_NM * (_scores(v_NK, v_NR, up_MK, up_MR, rest) - delta_M[None, :])
            grad_k_NK, grad_k_NR = _add_weighted(grad_score_NM, q_MK, q_MR, grad_k_NK, grad_k_NR, rest)
    at = (row_long * num_tokens * num_groups + group) * size
    token = num_groups * size
    _put(grad_k + at, grad_k_NK * scale, grad_k_NR * scale, place, keys, token, num_tokens, size, wide, rest)
    _put(grad_v + at, grad_v_NK, grad_v_NR, place, keys, token, num_tokens, size, wide, rest)


@triton.jit
def cross_entropy_row(logits, target, weight, loss, stride, vocabulary, with_grad: tl.constexpr, chunk: tl.constexpr):
    """One position: weight * -log softmax(logits)[target]; with `with_grad` its gradient takes the logits' place."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    at = tl.load(target + row)
    count = tl.load(weight + row)
    target_logit = tl.load(logits + at).to(tl.float32)
    offset_C = tl.arange(0, chunk)
    top_C = tl.full([chunk], float("-inf"), tl.float32)
    sum_C = tl.zeros([chunk], tl.float32)
    for start in range(0, vocabulary, chunk):  # each lane its own maximum and sum; they meet once, after the loop
        logit_C = tl.load(logits + start + offset_C, mask=start + offset_C < vocabulary, other=float("-inf"))
        logit_C = logit_C.to(tl.float32)
        higher_C = tl.maximum(top_C, logit_C)
        safe_C = tl.where(higher_C == float("-inf"), 0.0, higher_C)
        sum_C = sum_C * tl.exp2((top_C - safe_C) * LOG2_E) + tl.exp2((logit_C - safe_C) * LOG2_E)
        top_C = higher_C
    top = tl.max(top_C, 0)
    total = tl.sum(sum_C * tl.exp2((top_C - top) * LOG2_E), 0)
    tl.store(loss + row, (tl.log(total) + top - target_logit) * count)
    if with_grad:
        share = count / total
        for start in range(0, vocabulary, chunk):
            offset = start + offset_C
            inside = offset < vocabulary
            logit_C = tl.load(logits + offset, mask=inside, other=float("-inf")).to(tl.float32)
            grad_C = tl.exp2((logit_C - top) * LOG2_E) * share
            grad_C = tl.where(offset == at, grad_C - count, grad_C)
            tl.store(logits + offset, grad_C.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _half(base, offset_N, column, stride, total, count: tl.constexpr, wide: tl.constexpr):
    """[positions, wide] values from `column` on, in float32; those past `count` are 0."""
    offset_P = tl.arange(0, wide)
    mask = (offset_N[:, None] < total) & (offset_P[None, :] < count)
    at = base + offset_N[:, None].to(tl.int64) * stride + column + offset_P[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _put_half(base, value, offset_N, column, stride, total, count: tl.constexpr, wide: tl.constexpr):
    offset_P = tl.arange(0, wide)
    mask = (offset_N[:, None] < total) & (offset_P[None, :] < count)
    at = base + offset_N[:, None].to(tl.int64) * stride + column + offset_P[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _gains(gain, first, count: tl.constexpr, wide: tl.constexpr):
    offset_P = tl.arange(0, wide)
    return tl.load(gain + first + offset_P, mask=offset_P < count, other=0.0).to(tl.float32)[None, :]


@triton.jit
def heads_forward(
    packed, q, k, q_gain, k_gain, cosine, sine,
    packed_token, total, num_tokens, table_row, epsilon,
    heads: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, rotated: tl.constexpr, normal: tl.constexpr,
    wide: tl.constexpr, rest_wide: tl.constexpr, positions: tl.constexpr,
):  # fmt: skip
    """One head of some positions: normalised, scaled by its gain, its first `rotated` dimensions rotated."""
    head = tl.program_id(1)
    pairs: tl.constexpr = rotated // 2
    rest: tl.constexpr = size - rotated
    offset_N = tl.program_id(0) * positions + tl.arange(0, positions)
    column = head * size
    low_NP = _half(packed, offset_N, column, packed_token, total, pairs, wide)
    high_NP = _half(packed, offset_N, column + pairs, packed_token, total, pairs, wide)
    square_N = tl.sum(low_NP * low_NP, 1) + tl.sum(high_NP * high_NP, 1)
    rest_NP = low_NP
    if rest > 0:
        rest_NP = _half(packed, offset_N, column + rotated, packed_token, total, rest, rest_wide)
        square_N += tl.sum(rest_NP * rest_NP, 1)
    gain = q_gain
    if head >= heads:
        gain = k_gain
    if normal:
        scale_N1 = tl.rsqrt(square_N / size + epsilon)[:, None]
        low_NP = low_NP * scale_N1 * _gains(gain, 0, pairs, wide)
        high_NP = high_NP * scale_N1 * _gains(gain, pairs, pairs, wide)
        if rest > 0:
            rest_NP = rest_NP * scale_N1 * _gains(gain, rotated, rest, rest_wide)
    place_N = offset_N // num_tokens * table_row + offset_N % num_tokens
    cosine_NP = _half(cosine, place_N, 0, pairs, total, pairs, wide)
    sine_NP = _half(sine, place_N, 0, pairs, total, pairs, wide)
    out = q
    out_token = heads * size
    if head >= heads:
        out = k
        out_token = groups * size
        column = (head - heads) * size
    _put_half(out, low_NP * cosine_NP - high_NP * sine_NP, offset_N, column, out_token, total, pairs, wide)
    _put_half(out, high_NP * cosine_NP + low_NP * sine_NP, offset_N, column + pairs, out_token, total, pairs, wide)
    if rest > 0:
        _put_half(out, rest_NP, offset_N, column + rotated, out_token, total, rest, rest_wide)


@triton.jit
def heads_backward(
    packed, grad_q, grad_k, grad_v, grad_packed, grad_gain, q_gain, k_gain, cosine, sine,
    packed_token, total, num_tokens, table_row, epsilon,
    heads: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, rotated: tl.constexpr, normal: tl.constexpr,
    wide: tl.constexpr, rest_wide: tl.constexpr, positions: tl.constexpr,
):  # fmt: skip
    """The way back, values' gradients being copied to where they belong. grad_gain: of each program its own sum,
    [tiles of positions, heads of queries and keys, size]."""
    head = tl.program_id(1)
    pairs: tl.constexpr = rotated // 2
    rest: tl.constexpr = size - rotated
    token: tl.constexpr = (heads + 2 * groups) * size
    offset_N = tl.program_id(0) * positions + tl.arange(0, positions)
    column = head * size
    given = grad_q
    given_token = heads * size
    at = head * size
    if head >= heads:
        given = grad_k
        given_token = groups * size
        at = (head - heads) * size
    if head >= heads + groups:
        given = grad_v
        at = (head - heads - groups) * size
    low_NP = _half(given, offset_N, at, given_token, total, pairs, wide)
    high_NP = _half(given, offset_N, at + pairs, given_token, total, pairs, wide)
    rest_NP = low_NP
    if rest > 0:
        rest_NP = _half(given, offset_N, at + rotated, given_token, total, rest, rest_wide)
    if head < heads + groups:
        place_N = offset_N // num_tokens * table_row + offset_N % num_tokens
        cosine_NP = _half(cosine, place_N, 0, pairs, total, pairs, wide)
        sine_NP = _half(sine, place_N, 0, pairs, total, pairs, wide)
        rotated_NP = low_NP * cosine_NP + high_NP * sine_NP
        high_NP = high_NP * cosine_NP - low_NP * sine_NP
        low_NP = rotated_NP
        if normal:
            gain = q_gain
            if head >= heads:
                gain = k_gain
            x_low_NP = _half(packed, offset_N, column, packed_token, total, pairs, wide)
            x_high_NP = _half(packed, offset_N, column + pairs, packed_token, total, pairs, wide)
            square_N = tl.sum(x_low_NP * x_low_NP, 1) + tl.sum(x_high_NP * x_high_NP, 1)
            x_rest_NP = x_low_NP
            if rest > 0:
                x_rest_NP = _half(packed, offset_N, column + rotated, packed_token, total, rest, rest_wide)
                square_N += tl.sum(x_rest_NP * x_rest_NP, 1)
            scale_N1 = tl.rsqrt(square_N / size + epsilon)[:, None]
            x_low_NP *= scale_N1
            x_high_NP *= scale_N1
            into = grad_gain + (tl.program_id(0) * (heads + groups) + head).to(tl.int64) * size
            offset_P = tl.arange(0, wide)
            tl.store(into + offset_P, tl.sum(low_NP * x_low_NP, 0), mask=offset_P < pairs)
            tl.store(into + pairs + offset_P, tl.sum(high_NP * x_high_NP, 0), mask=offset_P < pairs)
            low_NP *= _gains(gain, 0, pairs, wide)
            high_NP *= _gains(gain, pairs, pairs, wide)
            share_N = tl.sum(low_NP * x_low_NP, 1) + tl.sum(high_NP * x_high_NP, 1)
            if rest > 0:
                x_rest_NP *= scale_N1
                offset_R = tl.arange(0, rest_wide)
                tl.store(into + rotated + offset_R, tl.sum(rest_NP * x_rest_NP, 0), mask=offset_R < rest)
                rest_NP *= _gains(gain, rotated, rest, rest_wide)
                share_N += tl.sum(rest_NP * x_rest_NP, 1)
            share_N1 = (share_N / size)[:, None]
            low_NP = (low_NP - x_low_NP * share_N1) * scale_N1
            high_NP = (high_NP - x_high_NP * share_N1) * scale_N1
            if rest > 0:
                rest_NP = (rest_NP - x_rest_NP * share_N1) * scale_N1
    _put_half(grad_packed, low_NP, offset_N, column, token, total, pairs, wide)
    _put_half(grad_packed, high_NP, offset_N, column + pairs, token, total, pairs, wide)
    if rest > 0:
        _put_half(grad_packed, rest_NP, offset_N, column + rotated, token, total, rest, rest_wide)


@triton.jit
def swiglu_forward(packed, inner, size: tl.constexpr, chunk: tl.constexpr):
    """silu(gate) * up of one row; gate and up stand one after the other in `packed`."""
    row = tl.program_id(0).to(tl.int64)
    packed += row * 2 * size
    inner += row * size
    for start in range(0, size, chunk):
        offset = start + tl.arange(0, chunk)
        inside = offset < size
        gate = tl.load(packed + offset, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(packed + size + offset, mask=inside, other=0.0).to(tl.float32)
        tl.store(inner + offset, (gate * tl.sigmoid(gate) * up).to(inner.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(
    upstream, packed, weight, grad_packed, inner, grad_weight,
    size: tl.constexpr, weighted: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up. With `weighted` the row counts `weight`: `inner` gets what it was made of times that,
    and grad_weight the row's sum of upstream * silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    packed += row * 2 * size
    grad_packed += row * 2 * size
    upstream += row * size
    inner += row * size
    count = 1.0
    if weighted:
        count = tl.load(weight + row).to(tl.float32)
    total = tl.zeros([chunk], tl.float32)
    for start in range(0, size, chunk):
        offset = start + tl.arange(0, chunk)
        inside = offset < size
        gate = tl.load(packed + offset, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(packed + size + offset, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(upstream + offset, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        silu = gate * share
        if weighted:
            total += grad * silu * up
            tl.store(inner + offset, (silu * up * count).to(inner.dtype.element_ty), mask=inside)
            grad *= count
        kind = grad_packed.dtype.element_ty
        tl.store(grad_packed + offset, (grad * up * (share + silu * (1 - share))).to(kind), mask=inside)
        tl.store(grad_packed + size + offset, (grad * silu).to(kind), mask=inside)
    if weighted:
        tl.store(grad_weight + row, tl.sum(total, 0))


@triton.jit
def combine_expert_rows(y, rows, weight, out, width, chosen: tl.constexpr, weighted: tl.constexpr, chunk: tl.constexpr):
    """The (weighted) sum of a token's rows, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, chunk):
        offset = start + tl.arange(0, chunk)
        inside = offset < width
        total = tl.zeros([chunk], tl.float32)
        for number in range(chosen):
            row = tl.load(rows + token * chosen + number)
            value = tl.load(y + row * width + offset, mask=inside, other=0.0).to(tl.float32)
            if weighted:
                value *= tl.load(weight + token * chosen + number).to(tl.float32)
            total += value
        tl.store(out + token * width + offset, total.to(out.dtype.element_ty), mask=inside)
