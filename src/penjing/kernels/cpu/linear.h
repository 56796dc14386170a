/* What decode.c works on, and its linear layers: matmuls in pieces for a team's threads, with adapters by row and with
   the norm before them. kernels/cpu/decode.py has the same first structures, and packs the weights. */

#include "panels.h"
#include "team.h"
#ifdef __linux__
#include <sys/mman.h>
#endif

enum { KEYS = SIDE * PANEL }; /* of a step of attention */
enum { QUERY_ROWS = 48 };     /* at most, of all query heads on one key head, unless one token has more of them */
enum { FEW = 4 };             /* rows that every thread normalises for itself, rather than wait */

typedef struct { const char *a, *b; const float *gain; long rank; } Adapter; /* rank 0: says nothing here */
typedef struct { const char *panels; const Adapter *adapters; long inputs, outputs, type; } Linear;
typedef struct {
    const float *attention_gain, *mlp_gain, *qkv_bias, *query_gain, *key_gain; /* the last three may be NULL */
    Linear qkv, out;
    Linear gate_up, down;                                /* of a dense layer, or of the shared expert; or no outputs */
    Linear router, expert_gate_up, expert_down;          /* no outputs: a dense layer; else those of the first expert */
    long gate_up_step, down_step;                        /* bytes from one expert to the next */
    const float *correction, *shared_gate;               /* may be NULL */
    char *keys, *values;                                 /* [slots, G] of matrices in panels: [64, K] of 64 keys each; [K, S] */
    long window, num_experts;                            /* keys that a query sees; 0: all */
} Layer;
typedef struct {
    const char *embedding;
    const float *gain, *cosine, *sine; /* the tables [max_tokens, pairs] */
    const Layer *layers;
    Linear head;
    long embedding_type, cache_type, num_layers, width, query_heads, key_heads, head_dim, pairs;
    long num_slots, max_tokens, vocab_size, num_adapters, largest_rank, num_chosen, sigmoid, normalised;
    float epsilon, scaling;
} Decoder;
typedef struct {
    const int32_t *slot, *position, *id, *adapter, *wanted; /* adapter: -1, or NULL, for the base alone */
    long rows, num_wanted;
    float *logits; /* [num_wanted, head.outputs] */
} Rows;

/* What linear layers read: in float32, or rounded for matrices in bfloat16 (see rows_type); NULL is what nobody reads. */
typedef struct { float *x; uint16_t *rounded; long step; } Values;

INLINE const void *for_type(const Values *v, int type) {
    return rows_type(type) == BFLOAT16 ? (const void *)v->rounded : v->x;
}

/* What a pass works on, shared by its threads; widths are whole panels. */
typedef struct {
    const Decoder *model;
    const int32_t *slot, *position, *id, *adapter, *wanted;
    long rows, num_wanted, num_runs, num_blocks, blocks_apart, num_busy;
    float *logits;
    Values normal, attended, inner, expert_in, expert_inner;
    float *x, *qkv, *extra, *low, *scratch;
    float *score, *weight, *shared, *expert_out; /* of mixtures; as expert_in, of pairs of row and expert */
    int32_t *expert, *place, *end, *busy;
    int32_t *run, *block; /* where runs of rows with one adapter, and blocks of one slot's rows, begin; and the end */
    uint8_t *has_extra;
    const float **extra_gain;
} State;
typedef struct { Team team; State state; } Pass;

INLINE long whole(long x, long of) { return (x + of - 1) / of * of; }
INLINE long larger(long a, long b) { return a > b ? a : b; }
INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE Panels weights(const Linear *l) { return panels_of(l->panels, l->inputs, l->outputs, (int)l->type); }
INLINE long pieces_of(const Member *t, long items) { return smaller(items, (long)t->count * PIECES); }
/* Items of a stage's piece i are those from..to. */
INLINE long bound(long items, long pieces, long i) { return items * i / pieces; }

/* --- Rows --------------------------------------------------------------------------------------------------------- */

INLINE float sum_of(const Floats *lanes) {
    float value[PANEL];
    memcpy(value, lanes, sizeof value);
    for (int half = PANEL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) value[i] += value[i + half];
    return value[0];
}

/* x . y in a fixed order. */
INLINE float dot(const float *x, const float *y, long count) {
    Floats lanes[VECTORS];
    memset(lanes, 0, sizeof lanes);
    long i = 0;
    for (; i + PANEL <= count; i += PANEL)
        for (int v = 0; v < VECTORS; v++)
            lanes[v] += *(const Floats *)(x + i + v * WIDTH) * *(const Floats *)(y + i + v * WIDTH);
    float rest = 0.0f;
    for (; i < count; i++) rest += x[i] * y[i];
    return sum_of(lanes) + rest;
}

/* out = x / sqrt(mean(x^2) + epsilon) * gain; values beyond `count` of `wide` are 0. */
static void normalise(const float *x, const float *gain, float *out, long count, long wide, float epsilon) {
    float scale = 1.0f / sqrtf(dot(x, x, count) / (float)count + epsilon);
    SIMD for (long i = 0; i < wide; i++) out[i] = x[i] * scale * gain[i];
}

/* Rows from..to of `which` (NULL: of all), normalised. */
static void normalise_rows(const State *s, const float *gain, const int32_t *which, long from, long to,
                           const Values *out) {
    long width = s->model->width, wide = whole(width, PANEL);
    for (long r = from; r < to; r++) {
        float *normal = out->x + r * out->step;
        normalise(s->x + (which ? which[r] : r) * wide, gain, normal, width, wide, s->model->epsilon);
        if (out->rounded) SIMD for (long i = 0; i < wide; i++) put(out->rounded + r * out->step, i, normal[i], BFLOAT16);
    }
}

INLINE long most_queries(const Decoder *m) { return larger(QUERY_ROWS, m->query_heads / m->key_heads); }
/* Values of a thread's scratch: queries and outputs of attention, scores, sums; or a few rows, and these rounded. */
INLINE long scratch_size(const Decoder *m) {
    long attention = most_queries(m) * (2 * whole(m->head_dim, PANEL) + KEYS + 4);
    return whole(larger(attention, 2 * FEW * whole(m->width, PANEL)), 2 * PANEL);
}

/* --- Linear layers ------------------------------------------------------------------------------------------------ */

/* How a matmul is cut into pieces: rows, so many at a time, times columns. */
typedef struct { long high, down, across, threads; } Grid;

static Grid grid_of(const Member *t, long rows, const Panels *w) {
    long sides = (w->panels + SIDE - 1) / SIDE, pieces = (long)t->count * PIECES;
    long near = rows_near(w->inputs, w->type);
    Grid g = {0, larger((rows + near - 1) / near, 1), 0, t->count};
    g.across = smaller(sides, (2 * pieces + g.down - 1) / g.down); /* with fewer, threads end farther apart */
    if (t->count > 1 && g.across * g.down < pieces) /* more threads than columns */
        g.down = larger(g.down, smaller(pieces / g.across, rows / (4 * MOST_ROWS)));
    g.high = whole((rows + g.down - 1) / g.down, MOST_ROWS);
    g.down = larger((rows + g.high - 1) / g.high, 1);
    return g;
}

/* Part `column` of the `across` that a matrix's columns are cut into. */
static void multiply_part(const Values *in, long row, long rows, const Panels *w, long column, long across,
                          const Sink *to) {
    long sides = (w->panels + SIDE - 1) / SIDE;
    multiply(for_type(in, w->type), in->step, row, rows, w, bound(sides, across, column) * SIDE,
             smaller(bound(sides, across, column + 1) * SIDE, w->panels), to);
}

/* A piece; from where its thread will go on, if all are as fast, is asked for beside it (behind the last columns lies
   what was packed next, which is what is read next). */
static void multiply_piece(const Grid *g, long i, const Values *in, long rows, const Panels *w, const Sink *to) {
    long row = i / g->across * g->high, sides = (w->panels + SIDE - 1) / SIDE;
    Panels mine = *w;
    mine.after = w->data + bound(sides, g->across, i % g->across + g->threads) * w->side_bytes;
    multiply_part(in, row, smaller(g->high, rows - row), &mine, i % g->across, g->across, to);
}

/* What the adapter of a run of rows adds, by one of its two matrices, into s->low and s->extra. */
static void adapt_run(State *s, const Linear *l, const Values *in, long first, long last, int second) {
    const Adapter *a = s->adapter[first] < 0 ? 0 : l->adapters + s->adapter[first];
    long wide = s->model->largest_rank;
    int speaks = a && a->rank;
    for (long r = first; r < last; r++) {
        s->has_extra[r] = (uint8_t)speaks;
        s->extra_gain[r] = speaks ? a->gain : 0;
    }
    if (!speaks) return;
    Values low = {s->low, 0, wide};
    Sink to_low = {.out = s->low, .step = wide}, to_extra = {.out = s->extra, .step = l->outputs};
    Panels down = panels_of(a->a, l->inputs, whole(a->rank, PANEL), FLOAT32);
    Panels up = panels_of(a->b, a->rank, l->outputs, FLOAT32);
    multiply_part(second ? &low : in, first, last - first, second ? &up : &down, 0, 1, second ? &to_extra : &to_low);
}

/* Rows through a layer with their adapters. */
static void linear(Member *t, State *s, const Linear *l, Values in, Sink sink) {
    if (s->num_runs && l->adapters) {
        sink.extra = s->extra;
        sink.extra_step = l->outputs;
        sink.gain = s->extra_gain;
        sink.has_extra = s->has_extra;
        for (int second = 0; second < 2; second++)
            PIECE(t, i, s->num_runs) adapt_run(s, l, &in, s->run[i], s->run[i + 1], second);
    }
    Panels w = weights(l);
    Grid g = grid_of(t, s->rows, &w);
    PIECE(t, i, g.down * g.across) multiply_piece(&g, i, &in, s->rows, &w, &sink);
}

/* Rows `which` of x (NULL: all), normalised, then through a layer: each thread normalises few rows for itself. */
static void normalised_linear(Member *t, State *s, const float *gain, const int32_t *which, long rows, const Linear *l,
                              Sink sink) {
    long wide = whole(s->model->width, PANEL), own = rows <= FEW && !s->num_runs;
    Values normal = s->normal;
    if (own) {
        normal.x = s->scratch + t->number * scratch_size(s->model);
        if (normal.rounded) normal.rounded = (uint16_t *)(normal.x + FEW * wide);
    } else {
        long pieces = pieces_of(t, rows);
        PIECE(t, i, pieces)
            normalise_rows(s, gain, which, bound(rows, pieces, i), bound(rows, pieces, i + 1), &normal);
        if (!which) { linear(t, s, l, normal, sink); return; }
    }
    Panels w = weights(l);
    Grid g = grid_of(t, rows, &w);
    PIECE(t, i, g.down * g.across) {
        if (own) normalise_rows(s, gain, which, 0, rows, &normal);
        own = 0;
        multiply_piece(&g, i, &normal, rows, &w, &sink);
    }
}
