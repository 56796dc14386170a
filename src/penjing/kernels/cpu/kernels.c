/* The parts of a training step on a CPU other than matmuls, each in one pass over memory.

   Built on the user's machine, for its processor, by kernels/cpu/library.py; kernels/cpu/ops.py says what each takes and
   returns; tests compare all of them with torch's own operations. Threads take runs of rows. Sums over rows are a fixed
   number of partial sums, whatever the number of threads, so results are deterministic. */

#include "types.h"

INLINE float logistic(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* --- RMSNorm ------------------------------------------------------------------------------------------------------ */

/* out = x * scale * gain with scale = 1 / sqrt(mean(x^2) + epsilon). */
INLINE void rms_norm_row(const void *x, const float *gain, void *out, float *scale, long width, float epsilon, int type,
                     int out_type) {
    float squares = 0.0f;
    _Pragma("omp simd reduction(+ : squares)")
    for (long i = 0; i < width; i++) { float v = get(x, i, type); squares += v * v; }
    float s = *scale = 1.0f / sqrtf(squares / (float)width + epsilon);
    SIMD for (long i = 0; i < width; i++) put(out, i, get(x, i, type) * s * gain[i], out_type);
}

void penjing_rms_norm(const void *x, const float *gain, void *out, float *scale, long rows, long width, float epsilon,
                  int type, int out_type, int threads) {
    ROWS(threads) for (long n = 0; n < rows; n++)
        WITH_TYPES(rms_norm_row, type, out_type, row_of(x, n * width, type), gain, out_row_of(out, n * width, out_type),
                   scale + n, width, epsilon);
}

/* With n = x * scale and g = gain * grad_out: grad = (g - n mean(g n)) * scale (+ residual), and grad_out * n is added
   to gains. */
INLINE void rms_norm_backward_row(const void *x, float scale, const float *gain, const void *grad_out,
                                  const void *residual, void *grad, float *gains, long width, int type, int grad_out_type) {
    float share = 0.0f;
    _Pragma("omp simd reduction(+ : share)")
    for (long i = 0; i < width; i++) {
        float value = get(grad_out, i, grad_out_type) * get(x, i, type) * scale;
        gains[i] += value;
        share += value * gain[i];
    }
    share /= (float)width;
    SIMD for (long i = 0; i < width; i++)
        put(grad, i, (get(grad_out, i, grad_out_type) * gain[i] - get(x, i, type) * scale * share) * scale, type);
    if (residual) /* a separate loop, so that the value above is rounded first, as without a residual */
        SIMD for (long i = 0; i < width; i++) put(grad, i, get(grad, i, type) + get(residual, i, type), type);
}

/* gains: [num_sums, width], zeroed; each partial sum has an equal run of rows. */
void penjing_rms_norm_backward(const void *x, const float *scale, const float *gain, const void *grad_out,
                               const void *residual, void *grad, float *gains, long num_sums, long rows, long width,
                               int type, int grad_out_type, int threads) {
    long each = (rows + num_sums - 1) / num_sums;
    ROWS(threads) for (long k = 0; k < num_sums; k++)
        for (long n = k * each; n < rows && n < (k + 1) * each; n++)
            WITH_TYPES(rms_norm_backward_row, type, grad_out_type, row_of(x, n * width, type), scale[n], gain,
                       row_of(grad_out, n * width, grad_out_type), residual ? row_of(residual, n * width, type) : 0,
                       out_row_of(grad, n * width, type), gains + k * width, width);
}

/* --- dropout ------------------------------------------------------------------------------------------------------ */

INLINE void dropout_row(const void *x, void *out, uint32_t seed, int threshold, float scale, long width, int type) {
    SIMD for (long i = 0; i < width; i++) {
        uint32_t hash = (seed + (uint32_t)i) * 0x2C1B3C6Du;
        hash = (hash ^ (uint32_t)((int32_t)hash >> 15)) * 0x297A2D39u;
        put(out, i, (int32_t)hash < threshold ? 0.0f : get(x, i, type) * scale, type);
    }
}

/* As `dropout` in reference.py. seed: of each row of `width` values. */
void penjing_dropout(const void *x, const int32_t *seed, void *out, long rows, long width, int threshold, float scale,
                     int type, int threads) {
    ROWS(threads) for (long n = 0; n < rows; n++)
        WITH_TYPE(dropout_row, type, row_of(x, n * width, type), out_row_of(out, n * width, type), (uint32_t)seed[n],
                  threshold, scale, width);
}

/* --- sums of two types ---------------------------------------------------------------------------------------------*/

enum { RUN = 4096 }; /* values per work item */

INLINE void add_run(const float *x, const void *y, float *out, long count, int type) {
    SIMD for (long i = 0; i < count; i++) out[i] = x[i] + get(y, i, type);
}

/* out = x + y; out may be x. */
void penjing_add(const float *x, const void *y, float *out, long count, int type, int threads) {
    ROWS(threads) for (long start = 0; start < count; start += RUN)
        WITH_TYPE(add_run, type, x + start, row_of(y, start, type), out + start,
                  count - start < RUN ? count - start : RUN);
}

INLINE void add_scaled_run(float *x, const void *y, float keep, float scale, long count, int type) {
    SIMD for (long i = 0; i < count; i++) x[i] = x[i] * keep + get(y, i, type) * scale;
}

/* x = keep x + scale y */
void penjing_add_scaled(float *x, const void *y, float keep, float scale, long count, int type, int threads) {
    ROWS(threads) for (long start = 0; start < count; start += RUN)
        WITH_TYPE(add_scaled_run, type, x + start, row_of(y, start, type), keep, scale,
                  count - start < RUN ? count - start : RUN);
}

/* Updates the momentum's mean; out is Nesterov's step. */
void penjing_nesterov_update(const float *gradient, float *mean, float *out, float momentum, long count, int threads) {
    ROWS(threads) for (long start = 0; start < count; start += RUN) {
        long end = start + RUN < count ? start + RUN : count;
        SIMD for (long i = start; i < end; i++) {
            float g = gradient[i], m = mean[i] + (1.0f - momentum) * (g - mean[i]);
            mean[i] = m;
            out[i] = g + momentum * (m - g);
        }
    }
}

/* sums: of the squares of each run, in double. */
void penjing_sum_squares(const float *x, double *sums, long count, int threads) {
    ROWS(threads) for (long start = 0; start < count; start += RUN) {
        long end = start + RUN < count ? start + RUN : count;
        double sum = 0.0;
        _Pragma("omp simd reduction(+ : sum)")
        for (long i = start; i < end; i++) sum += (double)x[i] * (double)x[i];
        sums[start / RUN] = sum;
    }
}

/* --- SwiGLU ------------------------------------------------------------------------------------------------------- */

INLINE void swiglu_row(const void *gate, const void *up, void *inner, long width, int type) {
    SIMD for (long i = 0; i < width; i++) {
        float g = get(gate, i, type);
        put(inner, i, g * logistic(g) * get(up, i, type), type);
    }
}

/* inner[rows, width] = silu(gate) up. step: values from one row of gate, and of up, to the next. */
void penjing_swiglu(const void *gate, const void *up, void *inner, long rows, long width, long step, int type,
                   int threads) {
    ROWS(threads) for (long n = 0; n < rows; n++)
        WITH_TYPE(swiglu_row, type, row_of(gate, n * step, type), row_of(up, n * step, type),
                  out_row_of(inner, n * width, type), width);
}

INLINE void swiglu_backward_row(const void *grad_out, const void *gate, const void *up, void *inner, void *grad_gate,
                             void *grad_up, float weight, float *share, long width, int type) {
    if (share) {
        float sum[LANES] = {0};
        long i = 0;
        for (; i + LANES <= width; i += LANES)
            SIMD for (int j = 0; j < LANES; j++) {
                float g = get(gate, i + j, type);
                sum[j] += get(grad_out, i + j, type) * (g * logistic(g) * get(up, i + j, type));
            }
        for (; i < width; i++) {
            float g = get(gate, i, type);
            sum[0] += get(grad_out, i, type) * (g * logistic(g) * get(up, i, type));
        }
        *share = 0.0f;
        for (int j = 0; j < LANES; j++) *share += sum[j];
    }
    if (inner)
        SIMD for (long i = 0; i < width; i++) {
            float a = get(grad_out, i, type) * weight, g = get(gate, i, type), u = get(up, i, type), s = logistic(g);
            put(inner, i, g * s * u * weight, type);
            put(grad_gate, i, a * u * s * (1.0f + g * (1.0f - s)), type);
            put(grad_up, i, a * g * s, type);
        }
    else
        SIMD for (long i = 0; i < width; i++) {
            float a = get(grad_out, i, type) * weight, g = get(gate, i, type), u = get(up, i, type), s = logistic(g);
            put(grad_gate, i, a * u * s * (1.0f + g * (1.0f - s)), type);
            put(grad_up, i, a * g * s, type);
        }
}

/* The gradients of gate and up, and silu(gate) up in `inner` if it is there. Rows may have weights: `grad_out` is what it
   would be were each 1, `inner` comes with them, and share[rows] is their gradient. grad_up may be `grad_out`. step: of
   gate and up, grad_step: of their gradients. */
void penjing_swiglu_backward(const void *grad_out, const void *gate, const void *up, void *inner, void *grad_gate,
                          void *grad_up, const float *weight, float *share, long rows, long width, long step,
                          long grad_step, int type, int threads) {
    ROWS(threads) for (long n = 0; n < rows; n++)
        WITH_TYPE(swiglu_backward_row, type, row_of(grad_out, n * width, type), row_of(gate, n * step, type),
                  row_of(up, n * step, type), inner ? out_row_of(inner, n * width, type) : 0,
                  out_row_of(grad_gate, n * grad_step, type), out_row_of(grad_up, n * grad_step, type),
                  weight ? weight[n] : 1.0f, share ? share + n : 0, width);
}

/* --- attention: rotation, tiles, softmax -------------------------------------------------------------------------- */

/* Rotates pairs (i, i + pairs) and copies the other dimensions of the head. */
INLINE void rope_head(const void *x, void *y, const float *cosine, const float *sine, float sign, long pairs,
                      long size, int type, int y_type) {
    SIMD for (long i = 0; i < pairs; i++) {
        float a = get(x, i, type), b = get(x, i + pairs, type), s = sign * sine[i];
        put(y, i, a * cosine[i] - b * s, y_type);
        put(y, i + pairs, b * cosine[i] + a * s, y_type);
    }
    SIMD for (long i = 2 * pairs; i < size; i++) put(y, i, get(x, i, type), y_type);
}

/* The offset of position t, head h of row b in [B, T, H, K], or in tiles [B x tiles, H, TILE, K]. */
INLINE long place(long b, long t, long h, long tokens, long tiles, long heads, long size, int is_tiled) {
    if (!is_tiled) return ((b * tokens + t) * heads + h) * size;
    return (((b * tiles + t / TILE) * heads + h) * TILE + t % TILE) * size;
}

/* table_step: values between the tables of two rows, 0 if rows share one. Tiles are padded with zeros. */
void penjing_apply_rope(const void *x, void *y, const float *cosine, const float *sine, long table_step, float sign,
                  long pairs, long rows, long tokens, long heads, long size, int x_tiled, int y_tiled, int type,
                  int y_type, int threads) {
    long tiles = (tokens + TILE - 1) / TILE, all = y_tiled ? tiles * TILE : tokens;
    ROWS(threads) for (long n = 0; n < rows * all; n++) {
        long b = n / all, t = n % all;
        for (long h = 0; h < heads; h++) {
            void *to = out_row_of(y, place(b, t, h, tokens, tiles, heads, size, y_tiled), y_type);
            if (t >= tokens) { memset(to, 0, (size_t)size * (y_type == BFLOAT16 ? 2 : 4)); continue; }
            const void *from = row_of(x, place(b, t, h, tokens, tiles, heads, size, x_tiled), type);
            long angle = b * table_step + t * pairs;
            WITH_TYPES(rope_head, type, y_type, from, to, cosine + angle, sine + angle, sign, pairs, size);
        }
    }
}

/* Softmax of the first `seen` values, a multiple of LANES; the others become 0. */
INLINE void softmax_row(const void *scores, const void *bias, void *out, long seen, long width, int type) {
    float top = -INFINITY, sum = 0.0f, probs[seen];
    _Pragma("omp simd reduction(max : top)")
    for (long i = 0; i < seen; i++) {
        float v = probs[i] = get(scores, i, type) + get(bias, i, type);
        top = v > top ? v : top;
    }
    _Pragma("omp simd reduction(+ : sum)")
    for (long i = 0; i < seen; i++) sum += probs[i] = exponential(probs[i] - top);
    float share = 1.0f / sum;
    SIMD for (long i = 0; i < seen; i++) put(out, i, probs[i] * share, type);
    memset(out_row_of(out, seen, type), 0, (size_t)(width - seen) * (type == BFLOAT16 ? 2 : 4));
}

/* scores: [tiles x groups, queries, width], queries being heads that share a key head, TILE of each; bias:
   [tiles, TILE, width], which masks later keys. out may be scores. */
void penjing_softmax(const void *scores, const void *bias, void *out, long tiles, long groups, long queries,
                     long width, int type, int threads) {
    ROWS(threads) for (long n = 0; n < tiles * groups * queries; n++) {
        long tile = n / (groups * queries), query = n % queries % TILE;
        WITH_TYPE(softmax_row, type, row_of(scores, n * width, type),
                  row_of(bias, (tile * TILE + query) * width, type), out_row_of(out, n * width, type),
                  width - TILE + query / LANES * LANES + LANES, width);
    }
}

/* into[place] += value, tile by tile in order; each thread adds its part of every tile. */
void penjing_add_tiles(float *into, const int64_t *places, const void *value, long count, long size, int type,
                       int threads) {
    ROWS(threads) for (long start = 0; start < size; start += RUN / 4) {
        long run = size - start < RUN / 4 ? size - start : RUN / 4;
        for (long n = 0; n < count; n++) {
            float *to = into + places[n] * size + start;
            WITH_TYPE(add_run, type, to, row_of(value, n * size + start, type), to, run);
        }
    }
}

/* --- the head ----------------------------------------------------------------------------------------------------- */

enum { OUT_OF_RANGE = 2 };
enum { KEPT = 1 << 17 }; /* probs of a row that are kept between two passes; wider rows recompute them */

static int is_out_of_range(const int64_t *target, long rows, long width) {
    for (long n = 0; n < rows; n++)
        if (target[n] < 0 || target[n] >= width) return 1;
    return 0;
}

INLINE void cross_entropy_row(void *logits, int64_t target, float weight, float *loss, long width, int with_grad,
                              int type) {
    float top = -INFINITY, target_logit = get(logits, target, type), probs[width <= KEPT ? width : 1];
    double all = 0.0; /* a float32 sum would have a relative error of 1e-5 in wide rows */
    _Pragma("omp simd reduction(max : top)")
    for (long i = 0; i < width; i++) { float v = get(logits, i, type); top = v > top ? v : top; }
    for (long start = 0; start < width; start += RUN) {
        long end = start + RUN < width ? start + RUN : width;
        float part = 0.0f;
        _Pragma("omp simd reduction(+ : part)")
        for (long i = start; i < end; i++) {
            float each = exponential(get(logits, i, type) - top);
            if (width <= KEPT) probs[i] = each;
            part += each;
        }
        all += part;
    }
    float sum = (float)all;
    *loss = (logf(sum) + top - target_logit) * weight;
    if (!with_grad) return;
    float share = weight / sum;
    if (width <= KEPT)
        SIMD for (long i = 0; i < width; i++) put(logits, i, probs[i] * share, type);
    else
        SIMD for (long i = 0; i < width; i++) put(logits, i, exponential(get(logits, i, type) - top) * share, type);
    put(logits, target, exponential(target_logit - top) * share - weight, type);
}

/* weight * -log softmax(logits)[target]; with_grad: overwrites the logits with their gradient,
   (softmax - one_hot) * weight. */
int penjing_cross_entropy(void *logits, const int64_t *target, const float *weight, float *loss, long rows, long width,
                 int with_grad, int type, int threads) {
    if (is_out_of_range(target, rows, width)) return OUT_OF_RANGE;
    ROWS(threads) for (long n = 0; n < rows; n++)
        WITH_TYPE(cross_entropy_row, type, out_row_of(logits, n * width, type), target[n], weight[n], loss + n, width,
                  with_grad);
    return 0;
}

INLINE void log_probs_row(const void *logits, int64_t target, float *logp, float *entropy, float *norm, long width,
                          int type) {
    float top = -INFINITY, sum = 0.0f, mean = 0.0f;
    _Pragma("omp simd reduction(max : top)")
    for (long i = 0; i < width; i++) { float v = get(logits, i, type); top = v > top ? v : top; }
    _Pragma("omp simd reduction(+ : sum, mean)")
    for (long i = 0; i < width; i++) {
        float below = get(logits, i, type) - top, probs = exponential(below);
        sum += probs;
        mean += probs > 0.0f ? probs * below : 0.0f; /* of a logit of -infinity */
    }
    float log_sum = logf(sum);
    *norm = top + log_sum;
    *logp = get(logits, target, type) - *norm;
    *entropy = log_sum - mean / sum;
}

/* For each row log softmax(logits)[target], the entropy in nats, and the logsumexp. */
int penjing_log_probs(const void *logits, const int64_t *target, float *logp, float *entropy, float *norm, long rows,
                      long width, int type, int threads) {
    if (is_out_of_range(target, rows, width)) return OUT_OF_RANGE;
    ROWS(threads) for (long n = 0; n < rows; n++)
        WITH_TYPE(log_probs_row, type, row_of(logits, n * width, type), target[n], logp + n, entropy + n, norm + n,
                  width);
    return 0;
}

/* e^x for x <= 0 to within 4e-16 of it, as `exponential`; at most e^-700 below -700. NaN stays NaN. */
INLINE double exponential_double(double x) {
    static const double series[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                    1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0};
    x = x < -700.0 ? -700.0 : x;
    double shifted = x * 1.4426950408889634 + 6755399441055744.0; /* 1.5 x 2^52 */
    double n = shifted - 6755399441055744.0, power, sum = 1.0 / 6227020800;
    double r = (x - n * 0.69314718036912382) - n * 1.9082149292705877e-10; /* n * the first constant is without rounding */
    for (int i = 0; i < 13; i++) sum = sum * r + series[i];
    int64_t whole;
    memcpy(&whole, &shifted, 8);
    whole = (whole + 1023) << 52;
    memcpy(&power, &whole, 8);
    return sum * power;
}

/* Of each row of logits its largest value, how many equal it, and the logarithm of the sum of e^(logit - largest), in
   float64. */
void penjing_log_sum_exp(const float *logits, float *largest, int64_t *equal, double *log_sum, long rows, long width,
                         int threads) {
    ROWS(threads) for (long n = 0; n < rows; n++) {
        const float *row = logits + n * width;
        float top = -INFINITY;
        double sum = 0.0;
        long count = 0;
        _Pragma("omp simd reduction(max : top)")
        for (long i = 0; i < width; i++) top = row[i] > top ? row[i] : top;
        _Pragma("omp simd reduction(+ : sum, count)")
        for (long i = 0; i < width; i++) {
            sum += exponential_double((double)row[i] - (double)top);
            count += row[i] == top;
        }
        largest[n] = top;
        equal[n] = count;
        log_sum[n] = log(sum);
    }
}

INLINE void log_softmax_backward_row(void *logits, int64_t target, float norm, float grad_logp, long width, int type) {
    float target_logit = exponential(get(logits, target, type) - norm);
    SIMD for (long i = 0; i < width; i++) put(logits, i, exponential(get(logits, i, type) - norm) * -grad_logp, type);
    put(logits, target, (1.0f - target_logit) * grad_logp, type);
}

/* logits <- (one_hot - softmax(logits)) * grad_logp, the gradient of log softmax(logits)[target] * grad_logp. */
int penjing_log_softmax_backward(void *logits, const int64_t *target, const float *norm, const float *grad_logp,
                                 long rows, long width, int type, int threads) {
    if (is_out_of_range(target, rows, width)) return OUT_OF_RANGE;
    ROWS(threads) for (long n = 0; n < rows; n++)
        WITH_TYPE(log_softmax_backward_row, type, out_row_of(logits, n * width, type), target[n], norm[n], grad_logp[n],
                  width);
    return 0;
}
