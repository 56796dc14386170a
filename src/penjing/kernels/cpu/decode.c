/* A decoder's forward pass over rows of many sequences in one call: embedding, all blocks, last norm, head.

   A row is one token of one sequence. Keys and values of earlier tokens lie in slots, one for each sequence. Threads
   divide the outputs of every matrix among them and wait for one another between the steps; a row's values are the same
   bits whatever other rows are in the pass and whatever the number of threads. kernels/cpu/decode.py has the same
   structures and packs the weights. */

#include "panels.h"
#include <omp.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

enum { KEYS = SIDE * PANEL, QUERY_ROWS = 48 }; /* keys of a step of attention; queries, of all heads on one key head, at most */

typedef struct { const char *a, *b; const float *gain; long rank; } Adapter; /* rank 0: says nothing here */
typedef struct { const char *panels; const Adapter *adapters; long inputs, outputs, type; } Linear;
typedef struct {
    const float *attention_gain, *mlp_gain, *qkv_bias, *query_gain, *key_gain; /* the last three may be NULL */
    Linear qkv, out;
    Linear gate_up, down;                                /* of a dense layer, or of the shared expert; or no outputs */
    Linear router, expert_gate_up, expert_down;          /* no outputs: a dense layer; else those of the first expert */
    long gate_up_step, down_step;                        /* bytes from one expert to the next */
    const float *correction, *shared_gate;               /* may be NULL */
    char *keys, *values;                                 /* [slots, G, S / 64, K, 64] and [slots, G, S, K'] */
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

/* What a pass works on, shared by its threads; widths are whole panels. */
typedef struct {
    const Decoder *model;
    const Rows *rows;
    float *x, *normal, *qkv, *attended, *inner, *extra, *low, *scratch;
    float *score, *weight, *shared, *expert_in, *expert_inner, *expert_out; /* of mixtures; pairs of row and expert */
    int32_t *expert, *place, *end;
    uint8_t *has_extra;
    const float **extra_gain;
} State;
typedef struct { State *s; int number, count; } Thread;

INLINE long whole(long x, long of) { return (x + of - 1) / of * of; }
INLINE long larger(long a, long b) { return a > b ? a : b; }
INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE void wait_for_all(const Thread *t) { if (t->count > 1) { _Pragma("omp barrier") } }
/* This thread's share of items, in runs. */
INLINE long from(const Thread *t, long items) { return items * t->number / t->count; }
INLINE long to(const Thread *t, long items) { return items * (t->number + 1) / t->count; }
INLINE Panels weights(const Linear *l) { return panels_of(l->panels, l->inputs, l->outputs, (int)l->type); }

/* --- Linear layers ------------------------------------------------------------------------------------------------ */

/* This thread's share of x w: columns, and rows too where there are more threads than columns. */
static void multiply_share(const Thread *t, const float *x, long step, long rows, Panels w, const Sink *to) {
    long sides = (w.panels + SIDE - 1) / SIDE, blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    long across = smaller(t->count, sides), down = smaller(t->count / across, blocks);
    long column = t->number % across, line = t->number / across;
    if (line >= down) return;
    long first = sides * column / across * SIDE, last = smaller(sides * (column + 1) / across * SIDE, w.panels);
    long top = blocks * line / down * MOST_ROWS, bottom = smaller(blocks * (line + 1) / down * MOST_ROWS, rows);
    multiply(x, step, top, bottom - top, &w, first, last, to);
}

/* What the rows' adapters add, into s->extra; 0 where none has anything to say. Two waits, or none. */
static int adapt(const Thread *t, const Linear *l, const float *x, long step) {
    State *s = t->s;
    const int32_t *adapter = s->rows->adapter;
    if (!adapter || !l->adapters) return 0;
    for (int second = 0; second < 2; second++) {
        for (long r = 0, end; r < s->rows->rows; r = end) {
            for (end = r + 1; end < s->rows->rows && adapter[end] == adapter[r];) end++;
            const Adapter *a = adapter[r] < 0 ? 0 : l->adapters + adapter[r];
            int speaks = a && a->rank;
            if (!second && t->number == 0)
                for (long i = r; i < end; i++) { s->has_extra[i] = (uint8_t)speaks; s->extra_gain[i] = speaks ? a->gain : 0; }
            if (!speaks) continue;
            long wide = s->model->largest_rank;
            Sink low = {s->low + r * wide, wide, STORE, 0, 0, 0, 0, 0};
            Sink out = {s->extra + r * l->outputs, l->outputs, STORE, 0, 0, 0, 0, 0};
            Panels down = panels_of(a->a, l->inputs, whole(a->rank, PANEL), FLOAT32);
            Panels up = panels_of(a->b, a->rank, l->outputs, FLOAT32);
            if (second) multiply_share(t, low.out, wide, end - r, up, &out);
            else multiply_share(t, x + r * step, step, end - r, down, &low);
        }
        wait_for_all(t);
    }
    return 1;
}

/* x [rows, inputs] through a layer with its rows' adapters; all threads must take part, and wait afterwards. */
static void linear(const Thread *t, const Linear *l, const float *x, long step, long rows, float *out, long out_step,
                   int mode) {
    State *s = t->s;
    Sink sink = {out, out_step, mode, 0, 0, 0, 0, 0};
    if (adapt(t, l, x, step)) {
        sink.extra = s->extra;
        sink.extra_step = l->outputs;
        sink.gain = s->extra_gain;
        sink.has_extra = s->has_extra;
    }
    multiply_share(t, x, step, rows, weights(l), &sink);
}

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

static void normalise_rows(const Thread *t, const float *gain) {
    State *s = t->s;
    long width = s->model->width, wide = whole(width, PANEL);
    for (long r = from(t, s->rows->rows); r < to(t, s->rows->rows); r++)
        normalise(s->x + r * wide, gain, s->normal + r * wide, width, wide, s->model->epsilon);
    wait_for_all(t);
}

static void embed(const Thread *t) {
    State *s = t->s;
    const Decoder *m = s->model;
    long wide = whole(m->width, PANEL);
    for (long r = from(t, s->rows->rows); r < to(t, s->rows->rows); r++) {
        const void *row = row_of(m->embedding, s->rows->id[r] * m->width, (int)m->embedding_type);
        for (long i = 0; i < wide; i++) s->x[r * wide + i] = i < m->width ? get(row, i, (int)m->embedding_type) : 0.0f;
    }
}

/* --- Attention ---------------------------------------------------------------------------------------------------- */

INLINE char *keys_of(const Decoder *m, const Layer *l, long slot, long head) {
    long positions = whole(m->max_tokens, KEYS);
    return l->keys + bytes((slot * m->key_heads + head) * positions * m->head_dim, (int)m->cache_type);
}
INLINE char *values_of(const Decoder *m, const Layer *l, long slot, long head) {
    long positions = whole(m->max_tokens, KEYS);
    return l->values + bytes((slot * m->key_heads + head) * positions * whole(m->head_dim, PANEL), (int)m->cache_type);
}

/* Bias, norm and rotation of one head of a row; keys and values go to the slot. Heads: queries, keys, values. */
static void prepare_head(const State *s, const Layer *l, long row, long head) {
    const Decoder *m = s->model;
    long size = m->head_dim, pairs = m->pairs, position = s->rows->position[row], slot = s->rows->slot[row];
    float *x = s->qkv + row * l->qkv.outputs + head * size;
    if (l->qkv_bias) for (long i = 0; i < size; i++) x[i] += l->qkv_bias[head * size + i];
    if (head >= m->query_heads + m->key_heads) {
        long wide = whole(size, PANEL);
        char *values = values_of(m, l, slot, head - m->query_heads - m->key_heads);
        for (long i = 0; i < size; i++) put(values, position * wide + i, x[i], (int)m->cache_type);
        return;
    }
    const float *gain = head < m->query_heads ? l->query_gain : l->key_gain;
    if (gain) normalise(x, gain, x, size, size, m->epsilon);
    const float *cosine = m->cosine + position * pairs, *sine = m->sine + position * pairs;
    SIMD for (long i = 0; i < pairs; i++) {
        float first = x[i], second = x[i + pairs];
        x[i] = first * cosine[i] - second * sine[i];
        x[i + pairs] = second * cosine[i] + first * sine[i];
    }
    if (head < m->query_heads) {
        float scale = 1.0f / sqrtf((float)size);
        SIMD for (long i = 0; i < size; i++) x[i] *= scale;
        return;
    }
    char *keys = keys_of(m, l, slot, head - m->query_heads);
    long start = position / KEYS * KEYS * size + position % KEYS;
    for (long i = 0; i < size; i++) put(keys, start + i * KEYS, x[i], (int)m->cache_type);
}

/* One query's scores of KEYS keys, of which it sees first..last, into weights; what was summed before counts `scale`. */
INLINE void weigh(float *score, long first, long last, float *largest, float *sum, float *scale) {
    float most = *largest, total[PANEL] = {0};
    SIMD for (long i = 0; i < KEYS; i++) score[i] = i >= first && i <= last ? score[i] : -INFINITY;
    _Pragma("omp simd reduction(max : most)")
    for (long i = 0; i < KEYS; i++) most = score[i] > most ? score[i] : most;
    float above = most < -1e30f ? -1e30f : most; /* where it sees none yet */
    *scale = exponential(*largest - above);
    for (long i = 0; i < KEYS; i += PANEL)
        SIMD for (int j = 0; j < PANEL; j++) total[j] += score[i + j] = exponential(score[i + j] - above);
    for (int half = PANEL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) total[i] += total[i + half];
    *sum = *sum * *scale + total[0];
    *largest = most;
}

INLINE long most_queries(const Decoder *m) { return larger(QUERY_ROWS, m->query_heads / m->key_heads); }
/* Values of a thread's scratch. */
INLINE long scratch_size(const Decoder *m) {
    return whole(most_queries(m) * (2 * whole(m->head_dim, PANEL) + KEYS + 4), PANEL);
}

/* Some rows of one sequence, the query heads of one key head: softmax(q k^T) v in one pass over the keys. Their order
   and steps are those of positions, and so the same for a query in whatever rows it comes. */
static void attend(const Thread *t, const Layer *l, long row, long count, long head) {
    const State *s = t->s;
    const Decoder *m = s->model;
    const int32_t *position = s->rows->position + row;
    long shared = m->query_heads / m->key_heads, size = m->head_dim, wide = whole(size, PANEL), queries = count * shared;
    int type = (int)m->cache_type;
    float *query = s->scratch + t->number * scratch_size(m), *score = query + most_queries(m) * wide;
    float *sum = score + most_queries(m) * KEYS, *out = sum + 3 * most_queries(m);
    float *largest = sum + queries, *scale = largest + queries;
    for (long q = 0; q < queries; q++) {
        memcpy(query + q * wide, s->qkv + (row + q / shared) * l->qkv.outputs + (head * shared + q % shared) * size,
               (size_t)size * 4);
        memset(out + q * wide, 0, (size_t)wide * 4);
        largest[q] = -INFINITY;
        sum[q] = 0.0f;
    }
    const char *keys = keys_of(m, l, s->rows->slot[row], head), *values = values_of(m, l, s->rows->slot[row], head);
    long end = position[count - 1] + 1, start = l->window ? larger(0, position[0] + 1 - l->window) / KEYS * KEYS : 0;
    Sink scores = {score, KEYS, STORE, 0, 0, 0, 0, 0}, outs = {out, wide, RESCALE, scale, 0, 0, 0, 0};
    for (; start < end; start += KEYS) {
        long here = smaller(KEYS, end - start);
        Panels k = {keys + bytes(start * size, type), size, SIDE, 0, bytes(KEYS, type), type};
        Panels v = {values + bytes(start * wide, type), here, wide / PANEL, bytes(KEYS, type), bytes(wide, type), type};
        multiply(query, wide, 0, queries, &k, 0, SIDE, &scores);
        for (long q = 0; q < queries; q++) {
            long last = position[q / shared], first = l->window ? last + 1 - l->window : 0;
            weigh(score + q * KEYS, first - start, last - start, largest + q, sum + q, scale + q);
        }
        multiply(score, KEYS, 0, queries, &v, 0, v.panels, &outs);
    }
    long step = whole(m->query_heads * size, PANEL);
    for (long q = 0; q < queries; q++) {
        float *to = s->attended + (row + q / shared) * step + (head * shared + q % shared) * size, share = 1.0f / sum[q];
        SIMD for (long i = 0; i < size; i++) to[i] = out[q * wide + i] * share;
    }
}

static void attention(const Thread *t, const Layer *l) {
    State *s = t->s;
    const Decoder *m = s->model;
    long rows = s->rows->rows, heads = m->query_heads + 2 * m->key_heads, item = 0;
    linear(t, &l->qkv, s->normal, whole(m->width, PANEL), rows, s->qkv, l->qkv.outputs, STORE);
    wait_for_all(t);
    for (long i = from(t, rows * heads); i < to(t, rows * heads); i++) prepare_head(s, l, i / heads, i % heads);
    wait_for_all(t);
    const int32_t *slot = s->rows->slot;
    long most = most_queries(m) / (m->query_heads / m->key_heads);
    for (long r = 0, end; r < rows; r = end) {
        for (end = r + 1; end < rows && end < r + most && slot[end] == slot[r];) end++;
        for (long head = 0; head < m->key_heads; head++)
            if (item++ % t->count == t->number) attend(t, l, r, end - r, head);
    }
    wait_for_all(t);
    linear(t, &l->out, s->attended, whole(m->query_heads * m->head_dim, PANEL), rows, s->x, l->out.outputs, ADD);
    wait_for_all(t);
}

/* --- The other half of a block ------------------------------------------------------------------------------------ */

/* Which experts a row goes through, and what each counts. */
static void route(const State *s, const Layer *l, long row) {
    const Decoder *m = s->model;
    long count = l->router.outputs, chosen = m->num_chosen, experts = l->num_experts;
    float *score = s->score + row * count, sum = 0.0f, most = -INFINITY;
    if (m->sigmoid) {
        for (long e = 0; e < experts; e++) score[e] = 1.0f / (1.0f + exponential(-score[e]));
    } else {
        for (long e = 0; e < experts; e++) most = score[e] > most ? score[e] : most;
        for (long e = 0; e < experts; e++) sum += score[e] = exponential(score[e] - most);
        for (long e = 0; e < experts; e++) score[e] /= sum;
    }
    int32_t *expert = s->expert + row * chosen;
    float *weight = s->weight + row * chosen, total = 0.0f;
    for (long k = 0; k < chosen; k++) {
        long best = -1;
        float highest = 0.0f;
        for (long e = 0; e < experts; e++) {
            float value = score[e] + (l->correction ? l->correction[e] : 0.0f);
            int taken = 0;
            for (long j = 0; j < k; j++) taken |= expert[j] == e;
            if (!taken && (best < 0 || value > highest)) { best = e; highest = value; }
        }
        expert[k] = (int32_t)best;
        total += weight[k] = score[best];
    }
    for (long k = 0; k < chosen; k++) weight[k] = (m->normalised ? weight[k] / (total + 1e-20f) : weight[k]) * m->scaling;
}

/* The places of (row, expert) pairs, sorted by expert. */
static void sort_pairs(const State *s, const Layer *l) {
    long pairs = s->rows->rows * s->model->num_chosen;
    memset(s->end, 0, (size_t)(l->num_experts + 1) * sizeof *s->end);
    for (long p = 0; p < pairs; p++) s->end[s->expert[p] + 1]++;
    for (long e = 0; e < l->num_experts; e++) s->end[e + 1] += s->end[e];
    for (long p = 0; p < pairs; p++) s->place[p] = s->end[s->expert[p]]++; /* then end[e] is where expert e ends */
}

/* All experts' rows through one of their layers. */
static void through_experts(const Thread *t, const Layer *l, const Linear *first, long expert_bytes, const float *x,
                            long step, float *out, long out_step, int mode) {
    for (long e = 0; e < l->num_experts; e++) {
        long start = e ? t->s->end[e - 1] : 0, count = t->s->end[e] - start;
        Panels w = panels_of(first->panels + e * expert_bytes, first->inputs, first->outputs, (int)first->type);
        Sink sink = {out + start * out_step, out_step, mode, 0, 0, 0, 0, 0};
        if (count) multiply_share(t, x + start * step, step, count, w, &sink);
    }
}

static void mixture(const Thread *t, const Layer *l) {
    State *s = t->s;
    const Decoder *m = s->model;
    long rows = s->rows->rows, chosen = m->num_chosen, wide = whole(m->width, PANEL);
    linear(t, &l->router, s->normal, wide, rows, s->score, l->router.outputs, STORE);
    if (l->down.outputs) linear(t, &l->gate_up, s->normal, wide, rows, s->inner, l->gate_up.outputs / 2, SWIGLU);
    wait_for_all(t);
    for (long r = from(t, rows); r < to(t, rows); r++) route(s, l, r);
    wait_for_all(t);
    if (t->number == 0) sort_pairs(s, l);
    if (l->down.outputs) linear(t, &l->down, s->inner, l->gate_up.outputs / 2, rows, s->shared, wide, STORE);
    wait_for_all(t);
    for (long p = from(t, rows * chosen); p < to(t, rows * chosen); p++)
        memcpy(s->expert_in + s->place[p] * wide, s->normal + p / chosen * wide, (size_t)wide * 4);
    wait_for_all(t);
    long inner = l->expert_gate_up.outputs / 2;
    through_experts(t, l, &l->expert_gate_up, l->gate_up_step, s->expert_in, wide, s->expert_inner, inner, SWIGLU);
    wait_for_all(t);
    through_experts(t, l, &l->expert_down, l->down_step, s->expert_inner, inner, s->expert_out, wide, STORE);
    wait_for_all(t);
    for (long r = from(t, rows); r < to(t, rows); r++) {
        float gate = l->shared_gate ? 1.0f / (1.0f + exponential(-dot(s->normal + r * wide, l->shared_gate, m->width))) : 1.0f;
        for (long i = 0; i < wide; i++) {
            float sum = 0.0f;
            for (long k = r * chosen; k < (r + 1) * chosen; k++) sum += s->weight[k] * s->expert_out[s->place[k] * wide + i];
            if (l->down.outputs) sum += gate * s->shared[r * wide + i];
            s->x[r * wide + i] += sum;
        }
    }
    wait_for_all(t);
}

static void mlp(const Thread *t, const Layer *l) {
    State *s = t->s;
    long rows = s->rows->rows, wide = whole(s->model->width, PANEL), inner = l->gate_up.outputs / 2;
    linear(t, &l->gate_up, s->normal, wide, rows, s->inner, inner, SWIGLU);
    wait_for_all(t);
    linear(t, &l->down, s->inner, inner, rows, s->x, wide, ADD);
    wait_for_all(t);
}

/* --- The pass ----------------------------------------------------------------------------------------------------- */

static void run(const Thread *t) {
    State *s = t->s;
    const Decoder *m = s->model;
    const Rows *rows = s->rows;
    long wide = whole(m->width, PANEL);
    embed(t);
    wait_for_all(t);
    for (const Layer *l = m->layers; l < m->layers + m->num_layers; l++) {
        normalise_rows(t, l->attention_gain);
        attention(t, l);
        normalise_rows(t, l->mlp_gain);
        (l->num_experts ? mixture : mlp)(t, l);
    }
    for (long i = from(t, rows->num_wanted); i < to(t, rows->num_wanted); i++)
        normalise(s->x + rows->wanted[i] * wide, m->gain, s->normal + i * wide, m->width, wide, m->epsilon);
    wait_for_all(t);
    if (!rows->num_wanted) return;
    Sink sink = {rows->logits, m->head.outputs, STORE, 0, 0, 0, 0, 0};
    multiply_share(t, s->normal, wide, rows->num_wanted, weights(&m->head), &sink);
}

/* Lays out a pass's memory from `at` on (NULL: to learn how much it takes); returns its end. */
static char *lay_out(State *s, const Decoder *m, long rows, long threads, char *at) {
    long inner = 0, qkv = 0, extra = 0, experts = 0, expert_inner = 0, wide = whole(m->width, PANEL);
    for (const Layer *l = m->layers; l < m->layers + m->num_layers; l++) {
        inner = larger(inner, l->gate_up.outputs / 2);
        qkv = larger(qkv, l->qkv.outputs);
        extra = larger(extra, larger(larger(l->gate_up.outputs, l->qkv.outputs), larger(l->down.outputs, l->out.outputs)));
        experts = larger(experts, l->router.outputs);
        expert_inner = larger(expert_inner, l->expert_gate_up.outputs / 2);
    }
    long pairs = experts ? rows * m->num_chosen : 0;
    if (!m->largest_rank) extra = 0;
#define LAY(name, count) \
    do { s->name = (void *)at; at += whole((long)sizeof *s->name * (count), 64); } while (0)
    LAY(x, rows * wide);
    LAY(normal, rows * wide);
    LAY(qkv, rows * qkv);
    LAY(attended, rows * whole(m->query_heads * m->head_dim, PANEL));
    LAY(inner, rows * inner);
    LAY(extra, rows * extra);
    LAY(low, rows * m->largest_rank);
    LAY(scratch, threads * scratch_size(m));
    LAY(score, rows * experts);
    LAY(weight, pairs);
    LAY(shared, experts ? rows * wide : 0);
    LAY(expert_in, pairs * wide);
    LAY(expert_inner, pairs * expert_inner);
    LAY(expert_out, pairs * wide);
    LAY(expert, pairs);
    LAY(place, pairs);
    LAY(end, experts + 1);
    LAY(has_extra, rows);
    LAY(extra_gain, rows);
#undef LAY
    return at;
}

/* Bytes of memory that a pass over so many rows takes. */
long penjing_decode_bytes(const Decoder *m, long rows, int threads) {
    State s;
    return lay_out(&s, m, rows, threads, 0) - (char *)0;
}

/* One pass. memory: of `penjing_decode_bytes`, aligned to 64 bytes. Returns 2 for a slot, position, id
   or wanted row that is out of range. */
int penjing_decode(const Decoder *m, const Rows *rows, void *memory, int threads) {
    State s = {.model = m, .rows = rows};
    for (long r = 0; r < rows->rows; r++) {
        if (rows->slot[r] < 0 || rows->slot[r] >= m->num_slots) return 2;
        if (rows->position[r] < 0 || rows->position[r] >= m->max_tokens) return 2;
        if (rows->id[r] < 0 || rows->id[r] >= m->vocab_size) return 2;
        if (rows->adapter && rows->adapter[r] >= m->num_adapters) return 2;
    }
    for (long i = 0; i < rows->num_wanted; i++)
        if (rows->wanted[i] < 0 || rows->wanted[i] >= rows->rows) return 2;
    lay_out(&s, m, rows->rows, threads, memory);
    if (threads == 1) {
        run(&(Thread){&s, 0, 1});
        return 0;
    }
    _Pragma("omp parallel num_threads(threads)") {
        Thread mine = {&s, omp_get_thread_num(), omp_get_num_threads()};
        run(&mine);
    }
    return 0;
}

/* A matrix [O, I] into panels of `outputs` outputs: panel p of its own, of which the first begins with `start` zeros,
   becomes panel p * stride + offset. */
void penjing_pack(const void *x, long rows, long inputs, int from_type, char *panels, long outputs, long start,
                  long stride, long offset, int type, int threads) {
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")
    for (long p = start / PANEL; p <= (start + rows - 1) / PANEL; p++) {
        long first = larger(p * PANEL, start), last = smaller((p + 1) * PANEL, start + rows);
        const void *source = row_of(x, (first - start) * inputs, from_type);
        long output = (p * stride + offset) * PANEL + first % PANEL;
#define PACK(from_type) \
        do { if (type == INT8) pack_some(source, last - first, inputs, from_type, panels, output, outputs, INT8); \
             else if (type == BFLOAT16) pack_some(source, last - first, inputs, from_type, panels, output, outputs, BFLOAT16); \
             else pack_some(source, last - first, inputs, from_type, panels, output, outputs, FLOAT32); } while (0)
        if (from_type == BFLOAT16) PACK(BFLOAT16); else PACK(FLOAT32);
    }
}

/* Asks for large pages: a pass reads all weights, and few pages are sooner found, and sooner made. */
void penjing_use_large_pages(void *memory, long count) {
#ifdef MADV_HUGEPAGE
    madvise(memory, (size_t)count, MADV_HUGEPAGE); /* where it is refused, pages stay small */
#else
    (void)memory, (void)count;
#endif
}
