/* Attention over packed documents on a CPU, by the algorithm of arXiv:2307.08691: scores stay in cache.

   Queries and keys are in tiles of 64 positions, [rows x tiles, heads, TILE, size]. Position t of row b attends to keys
   first[b, t] to t; first does not decrease along a row. The softmax is in float32; probabilities and their gradients
   are rounded to the inputs' type for matmuls.

   All matmuls have one form, C[64, N] += A[64, M] B[M, N], with C in float32. In bfloat16 rows of B are interleaved in
   pairs, [M / 2, N, 2], as AMX and AVX512-BF16 need. */

#include <stdlib.h>

#include "types.h"

#ifdef HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
enum { WIDTH = 16, VECTORS = 4 }; /* floats of a vector; vectors of a row per block */
#elif defined(__AVX__)
enum { WIDTH = 8, VECTORS = 2 };
#else
enum { WIDTH = 4, VECTORS = 4 };
#endif
typedef float Vector __attribute__((vector_size(WIDTH * 4), aligned(4)));

int penjing_tiles = 0;

/* Enables or disables matrix units; returns whether they are used: enabled, present, and allowed by the system. */
int penjing_use_tiles(int enable) {
    penjing_tiles = 0;
#ifdef HAS_TILES
    enum { ASK = 0x1023, TILE_DATA = 18 }; /* arch_prctl: ARCH_REQ_XCOMP_PERM */
    if (enable) penjing_tiles = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
#else
    (void)enable;
#endif
    return penjing_tiles;
}

/* The types that attention supports: 1 for float32, 2 for bfloat16, or their sum. */
int penjing_attention_types(void) {
#if defined(__AVX512BF16__) && !defined(HAS_TILES) /* where both exist, AVX512-BF16 is slower than float32 */
    return 3;
#else
    return penjing_tiles ? 3 : 1;
#endif
}

/* --- matmuls ----------------------------------------------------------------------------------------------------- */

#ifdef HAS_TILES
/* 32 rows and 32 columns of C at a time, or the last 16. */
static void multiply_tiles(float *c, const uint16_t *a, const uint32_t *b, long columns, long inner, int adds) {
    for (long row = 0; row < TILE; row += 32)
        for (long column = 0; column < columns; column += 32) {
            float *to = c + row * columns + column;
            long step = columns * 4;
            int both = column + 32 <= columns;
            if (adds) {
                _tile_loadd(0, to, step);
                _tile_loadd(1, to + 16 * columns, step);
                if (both) { _tile_loadd(2, to + 16, step); _tile_loadd(3, to + 16 * columns + 16, step); }
            } else {
                _tile_zero(0);
                _tile_zero(1);
                if (both) { _tile_zero(2); _tile_zero(3); }
            }
            for (long m = 0; m < inner; m += 32) {
                const uint16_t *left = a + row * inner + m;
                const uint32_t *right = b + m / 2 * columns + column;
                _tile_loadd(4, left, inner * 2);
                _tile_loadd(5, left + 16 * inner, inner * 2);
                _tile_loadd(6, right, step);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
                if (both) {
                    _tile_loadd(7, right + 16, step);
                    _tile_dpbf16ps(2, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, to, step);
            _tile_stored(1, to + 16 * columns, step);
            if (both) { _tile_stored(2, to + 16, step); _tile_stored(3, to + 16 * columns + 16, step); }
        }
}
#endif

/* Four rows and `vectors` vectors of C at a time. `inner`: of A, in numbers or in pairs of them. */
INLINE void multiply_columns(float *c, const void *a, const void *b, long columns, long inner, int adds, int vectors,
                             int type) {
    for (long row = 0; row < TILE; row += 4) {
        Vector sum[4][VECTORS];
        for (int r = 0; r < 4; r++)
            for (int v = 0; v < vectors; v++)
                sum[r][v] = adds ? *(Vector *)(c + (row + r) * columns + v * WIDTH) : (Vector){0};
        for (long m = 0; m < inner; m++) {
            const float *right = (const float *)b + m * columns;
            for (int r = 0; r < 4; r++) {
                long place = (row + r) * inner + m;
                for (int v = 0; v < vectors; v++) {
                    Vector other = *(const Vector *)(right + v * WIDTH);
#ifdef __AVX512BF16__
                    if (type == BFLOAT16) {
                        __m512i pair = _mm512_set1_epi32(((const int32_t *)a)[place]);
                        sum[r][v] = (Vector)_mm512_dpbf16_ps((__m512)sum[r][v], (__m512bh)pair, (__m512bh)other);
                        continue;
                    }
#endif
                    sum[r][v] += other * ((const float *)a)[place];
                }
            }
        }
        for (int r = 0; r < 4; r++)
            for (int v = 0; v < vectors; v++) *(Vector *)(c + (row + r) * columns + v * WIDTH) = sum[r][v];
    }
}

INLINE void multiply_type(float *c, const void *a, const void *b, long columns, long inner, int adds, int type) {
    long column = 0, step = WIDTH * VECTORS;
    for (; column + step <= columns; column += step)
        multiply_columns(c + column, a, (const float *)b + column, columns, inner, adds, VECTORS, type);
    for (; column < columns; column += WIDTH)
        multiply_columns(c + column, a, (const float *)b + column, columns, inner, adds, 1, type);
}

/* C (+)= A B, C[TILE, columns], A[TILE, inner]; columns a multiple of 16. */
static void multiply(float *c, const void *a, const void *b, long columns, long inner, int adds, int type) {
    if (type == FLOAT32) { multiply_type(c, a, b, columns, inner, adds, FLOAT32); return; }
#ifdef HAS_TILES
    if (penjing_tiles && inner % 32 == 0) { multiply_tiles(c, a, b, columns, inner, adds); return; }
#endif
#ifdef __AVX512BF16__
    multiply_type(c, a, b, columns, inner / 2, adds, BFLOAT16);
#endif
}

/* x[rows, columns] transposed, values of four bytes; sides multiples of 8. */
static void transpose_blocks(const uint32_t *x, uint32_t *out, long rows, long columns) {
    for (long row = 0; row < rows; row += 8)
        for (long column = 0; column < columns; column += 8)
            transpose_32(x + row * columns + column, columns, out + column * rows + row, rows);
}

/* x[TILE, size] transposed, as the right side of a matmul. */
static void pack_transposed(const void *x, void *out, long size, int type) {
    transpose_blocks(x, out, TILE, type == BFLOAT16 ? size / 2 : size);
}

/* x[TILE, size] as the right side of a matmul. */
static void pack(const void *x, void *out, long size, int type) {
    if (type == FLOAT32) { memcpy(out, x, (size_t)(TILE * size * 4)); return; }
    for (long row = 0; row < TILE; row += 2) {
        const uint16_t *low = (const uint16_t *)x + row * size, *high = low + size;
        uint32_t *pair = (uint32_t *)out + row / 2 * size;
        SIMD for (long i = 0; i < size; i++) pair[i] = low[i] | (uint32_t)high[i] << 16;
    }
}

/* x[TILE, TILE] transposed, as the left side of a matmul. */
static void transpose_square(const void *x, void *out, int type) {
    if (type == FLOAT32) { transpose_blocks(x, out, TILE, TILE); return; }
#ifdef HAS_TILES
    for (long row = 0; row < TILE; row += STRIP)
        for (long column = 0; column < TILE; column += STRIP)
            pack_strip(x, TILE, TILE, TILE, row, column, (char *)out + (column * TILE + row) * 2, TILE * 2, 1);
    return;
#endif
    for (long row = 0; row < TILE; row += 8)
        for (long column = 0; column < TILE; column += 8)
            transpose_16((const uint16_t *)x + row * TILE + column, TILE, (uint16_t *)out + column * TILE + row, TILE);
}

/* --- a thread's scratch ---------------------------------------------------------------------------------------------- */

INLINE char *alloc(char **scratch, long count) {
    char *start = *scratch;
    *scratch += (count + 63) / 64 * 64;
    return start;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* The sum or the maximum of each row of x[TILE, LANES], vectorised over the rows. */
INLINE void fold(const float *x, float *out, int sums) {
    float transposed[LANES * TILE];
    transpose_blocks((const uint32_t *)x, (uint32_t *)transposed, TILE, LANES);
    for (int t = 0; t < TILE; t++) out[t] = transposed[t];
    for (int i = 1; i < LANES; i++)
        SIMD for (int t = 0; t < TILE; t++) {
            float other = transposed[i * TILE + t];
            out[t] = sums ? out[t] + other : other > out[t] ? other : out[t];
        }
}

/* One step of the online softmax: a tile of scores becomes probabilities relative to each query's running maximum, and
   the running sums, sum[TILE] and mixed[TILE, size], are rescaled. Query t attends to keys low[t] - before to
   after + t; of these, unless end is NULL, to those whose end is above `before + after + t`. */
INLINE void probs_tile(float *scores, void *probs, float *top, float *sum, float *mixed, long size, float scale,
                      const int32_t *low, const int32_t *end, long before, long after, int type) {
    float part[TILE * LANES], folded[TILE], rescale[TILE], base[TILE];
    for (int t = 0; t < TILE; t++) {
        float *row = scores + t * TILE, *best = part + t * LANES;
        int from = (int)(low[t] - before), to = (int)(after + t);
        for (int i = 0; i < LANES; i++) best[i] = -INFINITY;
        if (end) SIMD for (int s = 0; s < TILE; s++) row[s] = end[s] > before + to ? row[s] : -INFINITY;
        for (int s = 0; s < TILE; s += LANES)
            SIMD for (int i = 0; i < LANES; i++) {
                float value = row[s + i] = (s + i < from) | (s + i > to) ? -INFINITY : row[s + i] * scale;
                best[i] = value > best[i] ? value : best[i];
            }
    }
    fold(part, folded, 0);
    SIMD for (int t = 0; t < TILE; t++) {
        float highest = folded[t] > top[t] ? folded[t] : top[t];
        rescale[t] = highest == top[t] ? 1.0f : exponential(top[t] - highest);
        base[t] = highest == -INFINITY ? 0.0f : highest; /* a query without a visible key so far */
        top[t] = highest;
    }
    for (int t = 0; t < TILE; t++) {
        float *row = scores + t * TILE, *more = part + t * LANES;
        SIMD for (int s = 0; s < TILE; s++) row[s] = exponential(row[s] - base[t]);
        SIMD for (int s = 0; s < TILE; s++) put(probs, t * TILE + s, row[s], type);
        SIMD for (int i = 0; i < LANES; i++) more[i] = row[i];
        for (int s = LANES; s < TILE; s += LANES)
            SIMD for (int i = 0; i < LANES; i++) more[i] += row[s + i];
        if (rescale[t] != 1.0f)
            SIMD for (long i = 0; i < size; i++) mixed[t * size + i] *= rescale[t];
    }
    fold(part, folded, 1);
    SIMD for (int t = 0; t < TILE; t++) sum[t] = sum[t] * rescale[t] + folded[t];
}

INLINE void finish_row(const float *mixed, void *out, float share, long size, int type) {
    SIMD for (long i = 0; i < size; i++) put(out, i, mixed[i] * share, type);
}

/* mixed = softmax(scale q k^T) v, and norm[n, h, t], the logsumexp of each query's scores. end: of trees, one past the
   last query that attends to each key; or NULL. Returns 1 if out of memory. */
int penjing_attention(const void *q, const void *k, const void *v, const int32_t *first, const int32_t *end,
                      void *mixed, float *norm, long rows, long tiles, long heads, long groups, long size, float scale,
                      int type, int threads) {
    long repeats = heads / groups, tile = TILE * size;
    long need = 2 * bytes(tile, type) + bytes(TILE * TILE, type) + 4 * TILE * TILE + repeats * (tile * 4 + TILE * 8);
    int failed = 0;
    _Pragma("omp parallel num_threads(threads) if (threads > 1)")
    {
        char before[64] __attribute__((aligned(64))) = {0};
        char *memory = aligned_alloc(64, (size_t)(need / 64 + 8) * 64), *scratch = memory;
        if (!memory) {
            _Pragma("omp atomic write")
            failed = 1;
        }
        begin_thread(before);
        void *transposed = alloc(&scratch, bytes(tile, type)), *packed = alloc(&scratch, bytes(tile, type));
        void *probs = alloc(&scratch, bytes(TILE * TILE, type));
        float *scores = (float *)alloc(&scratch, 4 * TILE * TILE), *sums = (float *)alloc(&scratch, repeats * tile * 4);
        float *top = (float *)alloc(&scratch, repeats * TILE * 4), *sum = (float *)alloc(&scratch, repeats * TILE * 4);
        _Pragma("omp for schedule(dynamic)")
        for (long unit = 0; unit < rows * tiles * groups; unit++) {
            long n = unit / groups, group = unit % groups, b = n / tiles, at = n % tiles;
            const int32_t *starts = first + (b * tiles + at) * TILE;
            if (!memory) continue;
            memset(sums, 0, (size_t)(repeats * tile * 4));
            for (long i = 0; i < repeats * TILE; i++) { top[i] = -INFINITY; sum[i] = 0.0f; }
            for (long j = starts[0] / TILE; j <= at; j++) {
                long keys = ((b * tiles + j) * groups + group) * tile;
                pack_transposed(row_of(k, keys, type), transposed, size, type);
                pack(row_of(v, keys, type), packed, size, type);
                for (long r = 0; r < repeats; r++) {
                    multiply(scores, row_of(q, (n * heads + group * repeats + r) * tile, type), transposed, TILE, size, 0,
                             type);
                    WITH_TYPE(probs_tile, type, scores, probs, top + r * TILE, sum + r * TILE, sums + r * tile, size,
                              scale, starts, end ? end + (b * tiles + j) * TILE : NULL, j * TILE, (at - j) * TILE);
                    multiply(sums + r * tile, probs, packed, size, TILE, 1, type);
                }
            }
            for (long i = 0; i < repeats * TILE; i++) {
                long place = (n * heads + group * repeats) * TILE + i;
                norm[place] = top[i] + logf(sum[i]);
                WITH_TYPE(finish_row, type, sums + i * size, out_row_of(mixed, place * size, type), 1.0f / sum[i], size);
            }
        }
        end_thread(before);
        free(memory);
    }
    return failed;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* With queries along the rows: P^T = exp(scale scores - norm) and its scores' gradient, scale P (grad_probs - share).
   Query t attends to keys low[t] - before to after + t. */
INLINE void backward_tile(const float *scores, const float *grad_probs, void *probs, void *grads, float scale,
                        const float *norm, const float *share, const int32_t *low, int before, int after, int type) {
    for (int s = 0; s < TILE; s++)
        SIMD for (int t = 0; t < TILE; t++) {
            int place = s * TILE + t, hidden = (s + before < low[t]) | (s > after + t);
            float p = hidden ? 0.0f : exponential(scores[place] * scale - norm[t]);
            put(probs, place, p, type);
            put(grads, place, p * (grad_probs[place] - share[t]) * scale, type);
        }
}

/* sum(grad_out mixed) of each of TILE rows. */
INLINE void delta_tile(const void *grad_out, const void *mixed, float *share, long size, int type) {
    float part[TILE * LANES];
    for (int t = 0; t < TILE; t++) {
        float *sum = part + t * LANES;
        for (int i = 0; i < LANES; i++) sum[i] = 0.0f;
        for (long d = t * size; d < (t + 1) * size; d += LANES)
            SIMD for (int i = 0; i < LANES; i++) sum[i] += get(grad_out, d + i, type) * get(mixed, d + i, type);
    }
    fold(part, share, 1);
}

/* The gradients of q, in its type, and of k and v in float32. With P the probabilities and U = grad_out: dv = P^T U,
   dS = P (U v^T - sum(U mixed)), dq = scale dS k, dk = scale dS^T q. Scores are computed transposed, as two
   of the three matmuls need P^T and dS^T. One thread computes a key head of a row. */
int penjing_attention_backward(const void *grad_out, const void *q, const void *k, const void *v, const void *mixed,
                             const float *norm, const int32_t *first, void *grad_q, float *grad_k, float *grad_v,
                             long rows, long tiles, long heads, long groups, long size, float scale, int type,
                             int threads) {
    long repeats = heads / groups, tile = TILE * size, each = bytes(tile, type), square = bytes(TILE * TILE, type);
    long need = (tiles + 4 * repeats) * each + 3 * square + 8 * TILE * TILE + repeats * (tile * 4 + TILE * 4);
    int failed = 0;
    _Pragma("omp parallel num_threads(threads) if (threads > 1)")
    {
        char before[64] __attribute__((aligned(64))) = {0};
        char *memory = aligned_alloc(64, (size_t)(need / 64 + 16) * 64), *scratch = memory;
        if (!memory) {
            _Pragma("omp atomic write")
            failed = 1;
        }
        begin_thread(before);
        char *keys = alloc(&scratch, tiles * each), *queries = alloc(&scratch, repeats * each);
        char *upstream = alloc(&scratch, repeats * each), *queries_transposed = alloc(&scratch, repeats * each);
        char *upstream_transposed = alloc(&scratch, repeats * each), *probs = alloc(&scratch, square);
        char *grads = alloc(&scratch, square), *grads_transposed = alloc(&scratch, square);
        float *scores = (float *)alloc(&scratch, 4 * TILE * TILE);
        float *grad_probs = (float *)alloc(&scratch, 4 * TILE * TILE);
        float *sums = (float *)alloc(&scratch, repeats * tile * 4);
        float *share = (float *)alloc(&scratch, repeats * TILE * 4);
        _Pragma("omp for schedule(dynamic)")
        for (long unit = 0; unit < rows * groups; unit++) {
            long b = unit / groups, group = unit % groups;
            if (!memory) continue;
            for (long j = 0; j < tiles; j++) {
                long place = ((b * tiles + j) * groups + group) * tile;
                pack(row_of(k, place, type), keys + j * each, size, type);
                memset(grad_k + place, 0, (size_t)tile * 4);
                memset(grad_v + place, 0, (size_t)tile * 4);
            }
            for (long at = 0; at < tiles; at++) {
                const int32_t *starts = first + (b * tiles + at) * TILE;
                long head = (b * tiles + at) * heads + group * repeats;
                const void *q_here = row_of(q, head * tile, type), *grad_out_here = row_of(grad_out, head * tile, type);
                memset(sums, 0, (size_t)(repeats * tile * 4));
                for (long r = 0; r < repeats; r++) {
                    const void *query = row_of(q_here, r * tile, type);
                    const void *grad_out_head = row_of(grad_out_here, r * tile, type);
                    pack(query, queries + r * each, size, type);
                    pack(grad_out_head, upstream + r * each, size, type);
                    pack_transposed(query, queries_transposed + r * each, size, type);
                    pack_transposed(grad_out_head, upstream_transposed + r * each, size, type);
                    WITH_TYPE(delta_tile, type, grad_out_head, row_of(mixed, (head + r) * tile, type), share + r * TILE,
                              size);
                }
                for (long j = starts[0] / TILE; j <= at; j++) {
                    long place = ((b * tiles + j) * groups + group) * tile;
                    const void *key = row_of(k, place, type), *value = row_of(v, place, type);
                    for (long r = 0; r < repeats; r++) {
                        multiply(scores, key, queries_transposed + r * each, TILE, size, 0, type);
                        multiply(grad_probs, value, upstream_transposed + r * each, TILE, size, 0, type);
                        WITH_TYPE(backward_tile, type, scores, grad_probs, probs, grads, scale, norm + (head + r) * TILE,
                                  share + r * TILE, starts, (int)(j * TILE), (int)((at - j) * TILE));
                        transpose_square(grads, grads_transposed, type);
                        multiply(grad_v + place, probs, upstream + r * each, size, TILE, 1, type);
                        multiply(grad_k + place, grads, queries + r * each, size, TILE, 1, type);
                        multiply(sums + r * tile, grads_transposed, keys + j * each, size, TILE, 1, type);
                    }
                }
                for (long i = 0; i < repeats * TILE; i++)
                    WITH_TYPE(finish_row, type, sums + i * size, out_row_of(grad_q, (head * TILE + i) * size, type), 1.0f,
                              size);
            }
        }
        end_thread(before);
        free(memory);
    }
    return failed;
}
