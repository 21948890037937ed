/* One pass over memory for a step with a rate per region; see native.py, which compiles this once for each REAL.
 *
 * Rounding is that of the same step in torch's operations, operation for operation, so the two agree bit for bit,
 * except where torch takes square roots from a library that rounds them in its own way. Sums are taken
 * block by block, so they do not depend on the number of threads. */
#include <stdint.h>
#include <stdlib.h>

#if !defined(__FMA__) && !defined(__ARM_FEATURE_FMA)
#undef FMA
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

/* A weight as the matrix [rows, columns]; the state that an optimizer does not have is null. */
typedef struct {
    REAL *weight, *first, *second, *largest;
    const REAL *grad;
    const REAL *values;  /* [values, regions]: numbers that differ between regions */
    const int32_t *runs; /* [kinds of row, runs, 2]: region and end of runs of columns; those past the last are empty */
    int64_t columns, regions, num_runs;
} Weight;

/* Some rows of a weight, all of one kind. */
typedef struct {
    int64_t weight, first_row, rows, kind;
} Block;

typedef struct {
    double momentum, undamped, decay, beta1, beta2;
    int64_t nesterov, maximize, decoupled;
} Settings;

typedef struct Work Work;
typedef void Update(const Work *, const Weight *, const Block *, REAL *rows, REAL *squares);
struct Work {
    Update *update;
    const Weight *weights;
    const Block *blocks;
    const Settings *settings;
    double *sums; /* [blocks, stride]: squares of the new weights by region, or null */
    int64_t num_blocks, num_values, stride, most_columns;
    int64_t next;
    int failed;
};

#define INLINE static inline __attribute__((always_inline))

/* What the flags say is known where these are inlined, so loops have no branches. */
INLINE REAL sgd_element(REAL p, REAL g, REAL *b, REAL rate, REAL mu, REAL undamped, REAL decay, const int moving,
                        const int nesterov, const int decayed) {
    if (decayed) g = FMA(decay, p, g);
    if (moving) {
        *b = FMA(undamped, g, mu * *b);
        g = nesterov ? FMA(mu, *b, g) : *b;
    }
    return FMA(g, rate, p);
}

/* Does ELEMENT(place) at every place of the block. Four rows go together: what belongs to a column, such as rates[c]
 * and the sum of squares, is then read a quarter as often (measured: 1, 2, 4, 8 rows take 10, 9.5, 8, 8.8 ms). */
#define EACH_ELEMENT(ELEMENT)                                                                                       \
    for (; i + 4 * n <= end; i += 4 * n) {                                                                          \
        _Pragma("GCC ivdep") for (int64_t c = 0; c < n; c++) {                                                      \
            REAL sum = squares[c];                                                                                  \
            { ELEMENT(i + c); }                                                                                     \
            { ELEMENT(i + n + c); }                                                                                 \
            { ELEMENT(i + 2 * n + c); }                                                                             \
            { ELEMENT(i + 3 * n + c); }                                                                             \
            squares[c] = sum;                                                                                       \
        }                                                                                                           \
    }                                                                                                               \
    for (; i < end; i += n) {                                                                                       \
        _Pragma("GCC ivdep") for (int64_t c = 0; c < n; c++) {                                                      \
            REAL sum = squares[c];                                                                                  \
            { ELEMENT(i + c); }                                                                                     \
            squares[c] = sum;                                                                                       \
        }                                                                                                           \
    }

INLINE void sgd_rows(const Settings *s, const Weight *w, const Block *block, const REAL *restrict rates,
                     REAL *restrict squares, const int moving, const int nesterov, const int decayed) {
    const REAL mu = s->momentum, undamped = s->undamped, decay = s->decay, sign = s->maximize ? -1 : 1;
    const int64_t n = w->columns, end = (block->first_row + block->rows) * n;
    REAL *restrict weight = w->weight, *restrict buffer = w->first;
    const REAL *restrict grad = w->grad;
    int64_t i = block->first_row * n;
#define SGD_ELEMENT(I)                                                                                              \
    REAL b = moving ? buffer[I] : 0;                                                                                \
    REAL p = sgd_element(weight[I], sign * grad[I], &b, rates[c], mu, undamped, decay, moving, nesterov, decayed);  \
    if (moving) buffer[I] = b;                                                                                      \
    weight[I] = p;                                                                                                  \
    sum = FMA(p, p, sum)
    EACH_ELEMENT(SGD_ELEMENT)
}

static void sgd_block(const Work *work, const Weight *w, const Block *block, REAL *rows, REAL *squares) {
    const Settings *s = work->settings;
#define SGD(MOVING, NESTEROV)                                                                                       \
    s->decay != 0 ? sgd_rows(s, w, block, rows, squares, MOVING, NESTEROV, 1)                                       \
                  : sgd_rows(s, w, block, rows, squares, MOVING, NESTEROV, 0)
    if (w->first == NULL) SGD(0, 0);
    else if (s->nesterov) SGD(1, 1);
    else SGD(1, 0);
}

INLINE void adam_rows(const Settings *s, const Weight *w, const Block *block, const REAL *rows, REAL *restrict squares,
                      const int near, const int decoupled, const int decayed, const int ams) {
    const int64_t n = w->columns, end = (block->first_row + block->rows) * n;
    const REAL *restrict rates = rows, *restrict eps = rows + n, *restrict keep = rows + 2 * n;
    const REAL lerp = 1 - s->beta1, rest = lerp - 1, beta2 = s->beta2, fresh = 1 - s->beta2;
    const REAL decay = s->decay, sign = s->maximize ? -1 : 1;
    REAL *restrict weight = w->weight, *restrict first = w->first, *restrict second = w->second;
    REAL *restrict largest = w->largest;
    const REAL *restrict grad = w->grad;
    int64_t i = block->first_row * n;
    /* The first moment as torch's lerp has it. */
#define ADAM_ELEMENT(I)                                                                                             \
    REAL g = sign * grad[I], p = weight[I], m = first[I];                                                           \
    if (decoupled) p = p * keep[c];                                                                                 \
    if (decayed) g = FMA(decay, p, g);                                                                              \
    m = near ? FMA(lerp, g - m, m) : FMA(rest, g - m, g);                                                           \
    REAL v = FMA(fresh * g, g, second[I] * beta2);                                                                  \
    first[I] = m;                                                                                                   \
    second[I] = v;                                                                                                  \
    if (ams) largest[I] = v = v < largest[I] ? largest[I] : v;                                                      \
    p = FMA(m / (SQRT(v) + eps[c]), rates[c], p);                                                                   \
    weight[I] = p;                                                                                                  \
    sum = FMA(p, p, sum)
    EACH_ELEMENT(ADAM_ELEMENT)
}

static void adam_block(const Work *work, const Weight *w, const Block *block, REAL *rows, REAL *squares) {
    const Settings *s = work->settings;
    const int near = 1 - s->beta1 < 0.5, ams = w->largest != NULL;
#define ADAM(NEAR, AMS)                                                                                             \
    s->decoupled    ? adam_rows(s, w, block, rows, squares, NEAR, 1, 0, AMS)                                        \
    : s->decay != 0 ? adam_rows(s, w, block, rows, squares, NEAR, 0, 1, AMS)                                        \
                    : adam_rows(s, w, block, rows, squares, NEAR, 0, 0, AMS)
    if (near && ams) ADAM(1, 1);
    else if (near) ADAM(1, 0);
    else if (ams) ADAM(0, 1);
    else ADAM(0, 0);
}

static void squares_block(const Work *work, const Weight *w, const Block *block, REAL *rows, REAL *squares) {
    (void)work, (void)rows;
    const int64_t n = w->columns, end = (block->first_row + block->rows) * n;
    int64_t i = block->first_row * n;
#define SQUARE(I) sum = FMA(w->weight[I], w->weight[I], sum)
    EACH_ELEMENT(SQUARE)
}

static void *run(void *argument) {
    Work *work = argument;
    /* A row for each value, and one for the sums of squares. */
    REAL *rows = malloc((work->num_values + 1) * work->most_columns * sizeof(REAL));
    if (rows == NULL) {
        __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
        return NULL;
    }
    for (;;) {
        int64_t i = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (i >= work->num_blocks) break;
        const Block *block = work->blocks + i;
        const Weight *w = work->weights + block->weight;
        const int32_t *runs = w->runs + block->kind * w->num_runs * 2;
        REAL *squares = rows + work->num_values * w->columns;
        for (int64_t c = 0; c < w->columns; c++) squares[c] = 0;
        for (int64_t v = 0; v < work->num_values; v++)
            for (int64_t r = 0, c = 0; r < w->num_runs; r++)
                for (const REAL value = w->values[v * w->regions + runs[2 * r]]; c < runs[2 * r + 1]; c++)
                    rows[v * w->columns + c] = value;
        work->update(work, w, block, rows, squares);
        if (work->sums == NULL) continue;
        for (int64_t r = 0, c = 0; r < w->num_runs; r++) {
            double sums[4] = {0, 0, 0, 0};
            for (; c + 4 <= runs[2 * r + 1]; c += 4)
                for (int k = 0; k < 4; k++) sums[k] += squares[c + k];
            for (; c < runs[2 * r + 1]; c++) sums[0] += squares[c];
            work->sums[i * work->stride + runs[2 * r]] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
        }
    }
    free(rows);
    return NULL;
}

/* Returns 0, or 1 where there was no memory. */
static int run_threads(Work *work, int64_t num_threads) {
    const int64_t most = num_threads < work->num_blocks ? num_threads : work->num_blocks;
#pragma omp parallel num_threads(most > 1 ? (int)most : 1)
    run(work);
    /* A thread without memory leaves its blocks to the others, unless all of them have none. */
    return work->failed && work->next < work->num_blocks;
}

#define ENTRY(NAME)                                                                                                 \
    int NAME(const Weight *weights, const Block *blocks, const Settings *settings, double *sums,                    \
             int64_t num_blocks, int64_t num_values, int64_t stride, int64_t most_columns, int64_t num_threads) {   \
        Work work = {NAME##_block, weights, blocks,     settings, sums, num_blocks,                                 \
                     num_values,   stride,  most_columns, 0,        0};                                             \
        return run_threads(&work, num_threads);                                                                     \
    }
ENTRY(sgd)
ENTRY(adam)
ENTRY(squares)
