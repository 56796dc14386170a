/* The gradient of a weight on a CPU with matrix units (AMX): a bfloat16 matmul that sums over tokens in float32.

   Both factors have one token per row. A matrix unit needs one factor transposed, in tiles of 16 by 32, and the other
   with its tokens interleaved in pairs. This packing is half of the work, so it is done in the cache: of one side (c_*)
   as much as fits stays there, the other side (s_*) is streamed block by block. */

#include <stdlib.h>

#include "types.h"

#ifdef HAS_TILES
enum { PAIR = 2048 };               /* bytes of two tiles */
enum { MAX_STRIPS = 16, MAX_DEPTH = 64 }; /* strips that stay in cache, and tiles of tokens */
enum { CACHED_BYTES = 1 << 19, STREAMED_BYTES = 3 << 17, MAX_GROUP = 8 }; /* packed bytes; streamed strips */

/* Packs strips `from` to `to` of token tiles `first` to `last` (of `depth`, from `token` on), strip by strip. */
static void pack_strips(const uint16_t *x, long tokens, long width, long step, long from, long to, long token, long first,
                        long last, long depth, char *out, int transposed) {
    for (long t = first; t < last; t++)
        for (long s = from; s < to; s++) {
            char *place = out + ((s - from) * depth + t) * PAIR;
            if (transposed) pack_strip(x, tokens, width, step, token + t * STRIP, s * STRIP, place, 64, 1);
            else pack_strip(x, tokens, width, step, token + t * STRIP, s * STRIP, place, 64, 0);
        }
}

/* out[rows, columns], at most STRIP by STRIP of a wider matrix, (+)= the matmul of two strips. */
static void multiply_strips(float *out, long step, long rows, long columns, const char *left, const char *right,
                            long depth, int adds) {
    float sum[STRIP * STRIP] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long t = 0; t < depth; t++, left += PAIR, right += PAIR) {
        _tile_loadd(4, left, 64);
        _tile_loadd(6, right, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, left + 1024, 64);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, right + 1024, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sum, STRIP * 4);
    _tile_stored(1, sum + 16 * STRIP, STRIP * 4);
    _tile_stored(2, sum + 16, STRIP * 4);
    _tile_stored(3, sum + 16 * STRIP + 16, STRIP * 4);
    uint32_t here = ~(uint32_t)0 >> (columns < STRIP ? STRIP - columns : 0);
    for (long row = 0; row < (rows < STRIP ? rows : STRIP); row++, out += step)
        for (int half = 0; half < STRIP; half += 16) {
            __mmask16 mask = (__mmask16)(here >> half);
            __m512 value = _mm512_load_ps(sum + row * STRIP + half);
            if (adds) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, out + half));
            _mm512_mask_storeu_ps(out + half, mask, value);
        }
}

/* out[O, N] (+)= grad_out[tokens, O]^T x[tokens, N]. step: values from one row of `grad_out` to the next. Returns 1
   if out of memory. */
int penjing_weight_grad(const void *grad_out, const void *x, float *out, long tokens, long outputs, long inputs,
                          long step, int adds, int threads) {
    int by_rows = outputs < inputs; /* grad_out stays in cache: the narrower of the two */
    const uint16_t *cached_x = by_rows ? grad_out : x, *streamed_x = by_rows ? x : grad_out;
    long c_width = by_rows ? outputs : inputs, s_width = by_rows ? inputs : outputs;
    long c_step = by_rows ? step : inputs, s_step = by_rows ? inputs : step;
    long strips = (c_width + STRIP - 1) / STRIP, others = (s_width + STRIP - 1) / STRIP;
    long parts = (strips + MAX_STRIPS - 1) / MAX_STRIPS, part = (strips + parts - 1) / parts;
    long tiles = (tokens + STRIP - 1) / STRIP, max_depth = CACHED_BYTES / PAIR / part;
    if (max_depth > MAX_DEPTH) max_depth = MAX_DEPTH;
    long blocks = (tiles + max_depth - 1) / max_depth, block = (tiles + blocks - 1) / blocks;
    long group = STREAMED_BYTES / PAIR / block < MAX_GROUP ? STREAMED_BYTES / PAIR / block : MAX_GROUP;
    long share = (others + threads - 1) / threads;
    if (group > share) group = share;
    int failed = 0;
    char *c_packed = aligned_alloc(64, (size_t)(part * block * PAIR));
    if (!c_packed) return 1;
    _Pragma("omp parallel num_threads(threads) if (threads > 1)")
    {
        char before[64] __attribute__((aligned(64))) = {0};
        char *s_packed = aligned_alloc(64, (size_t)(group * block * PAIR));
        if (!s_packed) {
            _Pragma("omp atomic write")
            failed = 1;
        }
        begin_thread(before);
        for (long first = 0; first < strips; first += part)
            for (long at = 0; at < tiles; at += block) {
                long depth = tiles - at < block ? tiles - at : block, end = first + part < strips ? first + part : strips;
                _Pragma("omp for schedule(static)")
                for (long t = 0; t < depth; t++)
                    pack_strips(cached_x, tokens, c_width, c_step, first, end, at * STRIP, t, t + 1, depth, c_packed,
                                by_rows);
                _Pragma("omp for schedule(static)")
                for (long from = 0; from < others; from += group) {
                    long to = from + group < others ? from + group : others, count = to - from;
                    if (!s_packed) continue;
                    pack_strips(streamed_x, tokens, s_width, s_step, from, to, at * STRIP, 0, depth, depth, s_packed,
                                !by_rows);
                    for (long i = 0; i < count * (end - first); i++) { /* row by row of `out` */
                        long s = by_rows ? i / count : i % (end - first), m = by_rows ? i % count : i / (end - first);
                        const char *c_strip = c_packed + s * depth * PAIR, *s_strip = s_packed + m * depth * PAIR;
                        long row = STRIP * (by_rows ? first + s : from + m), column = STRIP * (by_rows ? from + m : first + s);
                        multiply_strips(out + row * inputs + column, inputs, outputs - row, inputs - column,
                                        by_rows ? c_strip : s_strip, by_rows ? s_strip : c_strip, depth, adds || at > 0);
                    }
                }
            }
        end_thread(before);
        free(s_packed);
    }
    free(c_packed);
    return failed;
}
#else
int penjing_weight_grad(const void *grad_out, const void *x, float *out, long tokens, long outputs, long inputs,
                          long step, int adds, int threads) {
    (void)grad_out, (void)x, (void)out, (void)tokens, (void)outputs, (void)inputs, (void)step, (void)adds, (void)threads;
    return 1;
}
#endif
