/* Attention over packed documents on a CPU, by the algorithm of arXiv:2307.08691: scores never leave the cache.

   Queries and keys come in tiles of 64 positions, [rows x tiles, heads, TILE, size]; first[b, t] says which key is the
   first that position t of row b may look at, and the last is itself. It never falls along a row. The softmax is in
   float32; probabilities and slopes are rounded to the inputs' type where they meet a product.

   All products are of one form, C[64, N] += A[64, M] B[M, N], with C in float32. In bfloat16 B lies in pairs of rows,
   [M / 2, N, 2], as processors with products of such pairs want it: matrix units (AMX) or AVX512-BF16. */

#include <stdlib.h>

#include "cpu_types.h"

#if defined(__AVX512BF16__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
enum { WIDTH = 16, VECTORS = 4 }; /* values of a vector; vectors of a row that are worked on at once */
#elif defined(__AVX__)
enum { WIDTH = 8, VECTORS = 2 };
#else
enum { WIDTH = 4, VECTORS = 4 };
#endif
typedef float Vector __attribute__((vector_size(WIDTH * 4), aligned(4)));

static int uses_tiles = 0;

#ifdef HAS_TILES
/* Eight tiles of 16 rows of 64 bytes. */
static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} LAYOUT = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
#endif

/* Which types attention is taken in: 1 for float32, 2 for bfloat16, or their sum. tiles: whether matrix units may be
   used, which the system has to allow. */
int penjing_attention_types(int tiles) {
    uses_tiles = 0;
#ifdef HAS_TILES
    enum { ASK = 0x1023, TILE_DATA = 18 }; /* arch_prctl: ARCH_REQ_XCOMP_PERM */
    if (tiles) uses_tiles = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
#else
    (void)tiles;
#endif
#if defined(__AVX512BF16__) && !defined(HAS_TILES) /* where both are, the former is slower than float32 */
    return 3;
#else
    return uses_tiles ? 3 : 1;
#endif
}

int penjing_uses_tiles(void) { return uses_tiles; }

/* --- products ----------------------------------------------------------------------------------------------------- */

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
    if (uses_tiles && inner % 32 == 0) { multiply_tiles(c, a, b, columns, inner, adds); return; }
#endif
#ifdef __AVX512BF16__
    multiply_type(c, a, b, columns, inner / 2, adds, BFLOAT16);
#endif
}

/* x[rows, columns] turned, values of four bytes; sides multiples of 8. */
static void turn_fours(const uint32_t *x, uint32_t *out, long rows, long columns) {
    for (long row = 0; row < rows; row += 8)
        for (long column = 0; column < columns; column += 8)
            turn_32(x + row * columns + column, columns, out + column * rows + row, rows);
}

/* x[TILE, size] turned, as the right side of a product. */
static void pack_turned(const void *x, void *out, long size, int type) {
    turn_fours(x, out, TILE, type == BFLOAT16 ? size / 2 : size);
}

/* x[TILE, size] as the right side of a product. */
static void pack(const void *x, void *out, long size, int type) {
    if (type == FLOAT32) { memcpy(out, x, (size_t)(TILE * size * 4)); return; }
    for (long row = 0; row < TILE; row += 2) {
        const uint16_t *low = (const uint16_t *)x + row * size, *high = low + size;
        uint32_t *pair = (uint32_t *)out + row / 2 * size;
        SIMD for (long i = 0; i < size; i++) pair[i] = low[i] | (uint32_t)high[i] << 16;
    }
}

/* x[TILE, TILE] turned, as the left side of a product. */
static void turn_square(const void *x, void *out, int type) {
    if (type == FLOAT32) { turn_fours(x, out, TILE, TILE); return; }
    for (long row = 0; row < TILE; row += 8)
        for (long column = 0; column < TILE; column += 8)
            turn_16((const uint16_t *)x + row * TILE + column, TILE, (uint16_t *)out + column * TILE + row, TILE);
}

/* --- a thread's room ---------------------------------------------------------------------------------------------- */

INLINE char *taken(char **room, long count) {
    char *start = *room;
    *room += (count + 63) / 64 * 64;
    return start;
}

static void begin_thread(void *before) {
#ifdef HAS_TILES
    if (uses_tiles) { _tile_storeconfig(before); _tile_loadconfig(&LAYOUT); }
#else
    (void)before;
#endif
}

/* As another library may have left it. */
static void end_thread(const void *before) {
#ifdef HAS_TILES
    if (uses_tiles) _tile_loadconfig(before);
#else
    (void)before;
#endif
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* Scores of one query against a tile of keys, of which it sees `low` to `high`, become odds beside the highest so far;
   what was summed up by then is scaled to suit. */
INLINE void odds_row(const float *scores, void *odds, float *top, float *sum, float *mixed, long size, float scale,
                     long low, long high, int type) {
    float value[TILE], found = -INFINITY, more = 0.0f;
    _Pragma("omp simd reduction(max : found)")
    for (int s = 0; s < TILE; s++) {
        float v = value[s] = (s < low) | (s > high) ? -INFINITY : scores[s] * scale;
        found = v > found ? v : found;
    }
    float highest = found > *top ? found : *top, less = exponential(*top - highest);
    _Pragma("omp simd reduction(+ : more)")
    for (int s = 0; s < TILE; s++) more += value[s] = exponential(value[s] - highest);
    SIMD for (int s = 0; s < TILE; s++) put(odds, s, value[s], type);
    if (less != 1.0f)
        SIMD for (long i = 0; i < size; i++) mixed[i] *= less;
    *sum = *sum * less + more;
    *top = highest;
}

INLINE void finish_row(const float *mixed, void *out, float share, long size, int type) {
    SIMD for (long i = 0; i < size; i++) put(out, i, mixed[i] * share, type);
}

/* mixed = softmax(scale q k^T) v, and norm[n, h, t], the logarithm of each query's softmax's sum. Returns 1 where there
   is no memory for it. */
int penjing_attention(const void *q, const void *k, const void *v, const int32_t *first, void *mixed, float *norm,
                      long rows, long tiles, long heads, long groups, long size, float scale, int type, int threads) {
    long repeats = heads / groups, tile = TILE * size;
    long need = 2 * bytes(tile, type) + bytes(TILE * TILE, type) + 4 * TILE * TILE + repeats * (tile * 4 + TILE * 8);
    int failed = 0;
    _Pragma("omp parallel num_threads(threads) if (threads > 1)")
    {
        char before[64] __attribute__((aligned(64))) = {0};
        char *memory = aligned_alloc(64, (size_t)(need / 64 + 8) * 64), *room = memory;
        if (!memory) {
            _Pragma("omp atomic write")
            failed = 1;
        }
        begin_thread(before);
        void *turned = taken(&room, bytes(tile, type)), *packed = taken(&room, bytes(tile, type));
        void *odds = taken(&room, bytes(TILE * TILE, type));
        float *scores = (float *)taken(&room, 4 * TILE * TILE), *sums = (float *)taken(&room, repeats * tile * 4);
        float *top = (float *)taken(&room, repeats * TILE * 4), *sum = (float *)taken(&room, repeats * TILE * 4);
        _Pragma("omp for schedule(dynamic)")
        for (long unit = 0; unit < rows * tiles * groups; unit++) {
            long n = unit / groups, group = unit % groups, b = n / tiles, at = n % tiles;
            const int32_t *starts = first + (b * tiles + at) * TILE;
            if (!memory) continue;
            memset(sums, 0, (size_t)(repeats * tile * 4));
            for (long i = 0; i < repeats * TILE; i++) { top[i] = -INFINITY; sum[i] = 0.0f; }
            for (long j = starts[0] / TILE; j <= at; j++) {
                long keys = ((b * tiles + j) * groups + group) * tile;
                pack_turned(row_of(k, keys, type), turned, size, type);
                pack(row_of(v, keys, type), packed, size, type);
                for (long r = 0; r < repeats; r++) {
                    multiply(scores, row_of(q, (n * heads + group * repeats + r) * tile, type), turned, TILE, size, 0,
                             type);
                    for (long t = 0; t < TILE; t++) {
                        long low = starts[t] - j * TILE, high = (at - j) * TILE + t, place = r * TILE + t;
                        if (low >= TILE) { /* another document's */
                            memset(room_of(odds, t * TILE, type), 0, (size_t)bytes(TILE, type));
                            continue;
                        }
                        WITH_TYPE(odds_row, type, scores + t * TILE, room_of(odds, t * TILE, type), top + place,
                                  sum + place, sums + place * size, size, scale, low, high);
                    }
                    multiply(sums + r * tile, odds, packed, size, TILE, 1, type);
                }
            }
            for (long i = 0; i < repeats * TILE; i++) {
                long place = (n * heads + group * repeats) * TILE + i;
                norm[place] = top[i] + logf(sum[i]);
                WITH_TYPE(finish_row, type, sums + i * size, room_of(mixed, place * size, type), 1.0f / sum[i], size);
            }
        }
        end_thread(before);
        free(memory);
    }
    return failed;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* A row of P = exp(scale scores - norm) and of its scores' gradient, scale P (slopes - share). */
INLINE void slopes_row(const float *scores, const float *slopes, void *odds, void *grads, float scale, float norm,
                       float share, long low, long high, int type) {
    SIMD for (int s = 0; s < TILE; s++) {
        float p = (s < low) | (s > high) ? 0.0f : exponential(scores[s] * scale - norm);
        put(odds, s, p, type);
        put(grads, s, p * (slopes[s] - share) * scale, type);
    }
}

INLINE void share_row(const void *above, const void *mixed, float *share, long size, int type) {
    float sum = 0.0f;
    _Pragma("omp simd reduction(+ : sum)")
    for (long i = 0; i < size; i++) sum += get(above, i, type) * get(mixed, i, type);
    *share = sum;
}

/* The gradients of q, in its type, and of k and v in float32. With P the probabilities and U = above: dv = P^T U,
   dS = P (U v^T - sum(U mixed)), dq = scale dS k, dk = scale dS^T q. A key head of a row is one thread's. */
int penjing_attention_slopes(const void *above, const void *q, const void *k, const void *v, const void *mixed,
                             const float *norm, const int32_t *first, void *grad_q, float *grad_k, float *grad_v,
                             long rows, long tiles, long heads, long groups, long size, float scale, int type,
                             int threads) {
    long repeats = heads / groups, tile = TILE * size, each = bytes(tile, type), square = bytes(TILE * TILE, type);
    long need = (3 * tiles + 2 * repeats) * each + 4 * square + 8 * TILE * TILE + repeats * (tile * 4 + TILE * 4);
    int failed = 0;
    _Pragma("omp parallel num_threads(threads) if (threads > 1)")
    {
        char before[64] __attribute__((aligned(64))) = {0};
        char *memory = aligned_alloc(64, (size_t)(need / 64 + 16) * 64), *room = memory;
        if (!memory) {
            _Pragma("omp atomic write")
            failed = 1;
        }
        begin_thread(before);
        char *keys_turned = taken(&room, tiles * each), *values_turned = taken(&room, tiles * each);
        char *keys = taken(&room, tiles * each), *queries = taken(&room, repeats * each);
        char *upstream = taken(&room, repeats * each), *odds = taken(&room, square), *grads = taken(&room, square);
        char *odds_turned = taken(&room, square), *grads_turned = taken(&room, square);
        float *scores = (float *)taken(&room, 4 * TILE * TILE), *slopes = (float *)taken(&room, 4 * TILE * TILE);
        float *sums = (float *)taken(&room, repeats * tile * 4), *share = (float *)taken(&room, repeats * TILE * 4);
        _Pragma("omp for schedule(dynamic)")
        for (long unit = 0; unit < rows * groups; unit++) {
            long b = unit / groups, group = unit % groups;
            if (!memory) continue;
            for (long j = 0; j < tiles; j++) {
                long place = ((b * tiles + j) * groups + group) * tile;
                pack_turned(row_of(k, place, type), keys_turned + j * each, size, type);
                pack_turned(row_of(v, place, type), values_turned + j * each, size, type);
                pack(row_of(k, place, type), keys + j * each, size, type);
                memset(grad_k + place, 0, (size_t)tile * 4);
                memset(grad_v + place, 0, (size_t)tile * 4);
            }
            for (long at = 0; at < tiles; at++) {
                const int32_t *starts = first + (b * tiles + at) * TILE;
                long head = (b * tiles + at) * heads + group * repeats;
                const void *q_here = row_of(q, head * tile, type), *above_here = row_of(above, head * tile, type);
                memset(sums, 0, (size_t)(repeats * tile * 4));
                for (long r = 0; r < repeats; r++) {
                    pack(row_of(q_here, r * tile, type), queries + r * each, size, type);
                    pack(row_of(above_here, r * tile, type), upstream + r * each, size, type);
                }
                for (long i = 0; i < repeats * TILE; i++)
                    WITH_TYPE(share_row, type, row_of(above_here, i * size, type),
                              row_of(mixed, (head * TILE + i) * size, type), share + i, size);
                for (long j = starts[0] / TILE; j <= at; j++) {
                    long place = ((b * tiles + j) * groups + group) * tile;
                    for (long r = 0; r < repeats; r++) {
                        multiply(scores, row_of(q_here, r * tile, type), keys_turned + j * each, TILE, size, 0, type);
                        multiply(slopes, row_of(above_here, r * tile, type), values_turned + j * each, TILE, size, 0,
                                 type);
                        for (long t = 0; t < TILE; t++)
                            WITH_TYPE(slopes_row, type, scores + t * TILE, slopes + t * TILE,
                                      room_of(odds, t * TILE, type), room_of(grads, t * TILE, type), scale,
                                      norm[(head + r) * TILE + t], share[r * TILE + t], starts[t] - j * TILE,
                                      (at - j) * TILE + t);
                        turn_square(odds, odds_turned, type);
                        turn_square(grads, grads_turned, type);
                        multiply(grad_v + place, odds_turned, upstream + r * each, size, TILE, 1, type);
                        multiply(grad_k + place, grads_turned, queries + r * each, size, TILE, 1, type);
                        multiply(sums + r * tile, grads, keys + j * each, size, TILE, 1, type);
                    }
                }
                for (long i = 0; i < repeats * TILE; i++)
                    WITH_TYPE(finish_row, type, sums + i * size, room_of(grad_q, (head * TILE + i) * size, type), 1.0f,
                              size);
            }
        }
        end_thread(before);
        free(memory);
    }
    return failed;
}
