/* A pass of GPT-2 through all layers, in which no token depends on the other rows.

   Tokens are rows of matrices here: T of them, in the order of their pieces. Everything but attention
   treats each token by itself, and attention reads only the pages of the token's own row. So a
   token's result is the same, bit for bit, alone or beside others, in a prompt cut anywhere, and on
   any number of threads. Rows of one pass may have different adapters, or none.

   In shapes: C units, H heads of size S, F hidden units, V vocabulary; rows are padded (pass.h). */

#include "kernels.h"
#include "threads.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum {
  GROUPS = 6,      /* groups of columns that a thread takes at once: 70 KB of KoGPT2's matrices */
  HEAD_GROUPS = 24,
  FEW = 8,         /* with so many tokens or fewer, one thread does all between two products */
  AHEAD = 4,       /* tokens whose keys and values are prefetched before they are stored */
  THREAD_PARTS = 4, /* parts of attention for each thread, at least */
  RUN = 48,        /* queries of one row and head that a thread takes at once */
  MAX_RANK = 1 << 16, /* of an adapter */
  MAX_VOCAB = 1 << 24
};

/* Tokens of a piece that one thread attends for. */
typedef struct {
  const Piece *piece;
  size_t token, position, count; /* token: the first of them among the pass's */
} Run;

/* Rows of a product beside each other that have the same adapter. */
typedef struct {
  const Adapter *adapter;
  size_t row, count;
} Span;

/* The state of the pass under way. */
static struct {
  const Model *model;
  uint8_t *arena;
  const Piece *pieces;
  size_t num_pieces;
  size_t tokens;      /* T */
  size_t row;         /* padded C: the stride of x, h and attended */
  size_t head_bytes;  /* bytes of one head's keys, or values, on a page */
  size_t head_groups; /* parts of attention for each run */
  int layer;          /* number of the layer under way */
  float *x;           /* (T, C) the residual stream */
  float *h;           /* (T, C) after a LayerNorm */
  float *qkv;         /* (T, 3C): queries, keys, values, heads inside each */
  float *attended;    /* (T, C) */
  float *hidden;      /* (T, F) */
  float *scores;      /* for each thread: attend_floats */
  size_t scores_size; /* floats of `scores` for one thread */
  float *rotated;     /* (threads, padded F) */
  const uint8_t **pages; /* for each thread (pages of the longest row,) */
  size_t max_pages;
  void *quantized;    /* (T, max(C, F)) */
  Run *runs;
  size_t num_runs;
  Span *spans; /* of the rows that have adapters */
  size_t num_spans;
  const Span **span_of; /* (T,): a row's; NULL: none */
  int32_t more;         /* tokens that an adapter adds to the vocabulary, at most */
  float *down;          /* (T, R): what an adapter's first matrix makes of a product's x */
  size_t down_row;      /* R, the padded largest rank */
  void *coarse;         /* (T, max(C, F)); NULL: no adapter has few bits */
  int is_stored; /* the layer's new keys and values are on their pages */
} pass;

static struct {
  uint8_t *memory;
  size_t bytes;
} scratch;

static double times[5];
enum { EMBEDDING_TIME, PRODUCTS_TIME, ATTENTION_TIME, REST_TIME, HEAD_TIME };

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

static void count_time(int part, double *since) {
  const double time = now();
  times[part] += time - *since;
  *since = time;
}

void take_times(double taken[5]) {
  memcpy(taken, times, sizeof times);
  memset(times, 0, sizeof times);
}

static size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

/* The stride of qkv and hidden: a line more than a row, because rows at multiples of 4 KB would compete
   for a few sets of the L1 cache. */
static size_t wide_row(size_t count) { return padded(count) + LINE; }

/* Runs parts on all threads if that is worth waiting for them, else one part after the other. */
static void in_parallel_if(int worth, Work work, void *data, size_t parts) {
  if (worth)
    in_parallel(work, data, parts);
  else
    for (size_t part = 0; part < parts; part++) work(data, part, 0);
}

/* --- Products ------------------------------------------------------------------------------------ */

static size_t group_bytes(size_t k, int int8) {
  return LINE * (int8 ? whole_depths(k) + sizeof(float) + sizeof(int32_t) : k * sizeof(float));
}

size_t packed_bytes(size_t n, size_t k, int int8) { return ceil_div(n, LINE) * group_bytes(k, int8); }

static size_t rest_group_bytes(size_t k, int bits) {
  return whole_depths(k) / DEPTH * rest_depth_bytes(bits) + LINE * sizeof(float);
}

size_t rest_bytes(size_t n, size_t k, int bits) { return ceil_div(n, LINE) * rest_group_bytes(k, bits); }

/* The offset in AdapterLayer of what is added to a product of the layers. */
typedef enum {
  QKV = offsetof(AdapterLayer, qkv),
  ATTENTION_OUT = offsetof(AdapterLayer, attention_out),
  FFN_HIDDEN = offsetof(AdapterLayer, ffn_hidden),
  FFN_OUT = offsetof(AdapterLayer, ffn_out),
  HEAD = sizeof(AdapterLayer)
} Adapted;

typedef struct {
  const Matrix *matrix;
  const float *x, *residual;
  float *y;
  size_t count, stride, y_stride, k, n, groups_at_once, quantize_parts; /* y_stride: residual's, too */
  int normed; /* in int8: rows of x are divided by their root mean square */
  int gelu;
  Adapted adapted;
  Quantized quantized;
  Coarse coarse;
} Product;

/* Rows of floats are quantized in whole tiles of them. */
static size_t whole_tiles(size_t count) { return ceil_div(count, MAX_ROWS) * MAX_ROWS; }

static size_t quantized_bytes(size_t count, size_t k) {
  return whole_tiles(count) * (2 * whole_depths(k) + sizeof(float) + sizeof(int32_t));
}

static size_t coarse_bytes(size_t count, size_t k) {
  return count * (whole_depths(k) + sizeof(float) + sizeof(int32_t));
}

static float scale_of(const Product *p, size_t row) {
  if (!p->normed) return 1;
  return kernels->rms_scale(p->x + row * p->stride, p->k, pass.model->epsilon);
}

static const Change *change_of(const Adapter *adapter, Adapted product) {
  if (product == HEAD) return &adapter->head;
  return (const Change *)((const char *)(adapter->layers + pass.layer) + product);
}

/* Job part: quantizes BESIDE rows, whose numbers share cache lines. */
static void quantize_part(void *data, size_t part, int thread) {
  const Product *p = data;
  for (size_t row = part * BESIDE; row < p->count && row < (part + 1) * BESIDE; row++) {
    const float *x = p->x + row * p->stride;
    size_t k = p->k;
    if (p->adapted == FFN_OUT) { /* no matrix before GELU can rotate what comes out of it */
      k = padded(k);
      float *rotated = pass.rotated + thread * k;
      kernels->rotate(memcpy(rotated, x, k * sizeof *x), k / LINE, LINE);
      x = rotated;
    }
    const float scale = scale_of(p, row);
    kernels->quantize(x, k, scale, &p->quantized, row);
    const Span *span = pass.num_spans ? pass.span_of[row] : NULL;
    if (span && change_of(span->adapter, p->adapted)->bits)
      kernels->coarsen(x, k, scale, &p->coarse, row);
  }
}

static const float no_bias[LINE];

/* Bytes of a group of columns of an adapter's matrix. */
static size_t float_group_bytes(size_t k) {
  return k * LINE * (pass.model->int8 ? sizeof(uint16_t) : sizeof(float));
}

/* Job part: multiplies a span's rows of x with their adapter's first matrix. */
static void down_part(void *data, size_t part, int thread) {
  const Product *p = data;
  const Span *span = &pass.spans[part];
  const Change *change = change_of(span->adapter, p->adapted);
  float scales[RUN];
  (void)thread;
  if (!change->rank) return;
  for (size_t r = 0; r < span->count; r++) scales[r] = scale_of(p, span->row + r);
  for (size_t column = 0; column < (size_t)change->rank; column += LINE) {
    const uint8_t *packed = (const uint8_t *)change->down + column / LINE * float_group_bytes(p->k);
    const float *bias = change->down_bias ? change->down_bias + column : no_bias;
    for (size_t r = 0; r < span->count; r++) {
      const size_t row = span->row + r;
      float *down = memset(pass.down + row * pass.down_row + column, 0, LINE * sizeof(float));
      kernels->add_product(pass.model->int8, p->x + row * p->stride, p->k, packed, down);
      for (size_t c = 0; c < LINE; c++) down[c] = down[c] * scales[r] + bias[c];
    }
  }
}

/* Job part before a product: the first `quantize_parts` quantize x, the others are down_parts. */
static void prepare_part(void *data, size_t part, int thread) {
  const Product *p = data;
  if (part < p->quantize_parts)
    quantize_part(data, part, thread);
  else
    down_part(data, part - p->quantize_parts, thread);
}

/* Adds the term of low rank to a row of a group of columns, and prefetches what the next group needs. */
static void add_low_rank(const Change *change, size_t row, size_t group, float out[LINE]) {
  const size_t bytes = float_group_bytes(change->rank);
  const uint8_t *packed = (const uint8_t *)change->up + group * bytes;
  kernels->add_product(pass.model->int8, pass.down + row * pass.down_row, change->rank, packed, out);
  for (size_t at = 0; at < bytes && at < 2048; at += 64) __builtin_prefetch(packed + bytes + at);
  if (change->bias) __builtin_prefetch(change->bias + (group + 1) * LINE);
}

/* How many rows from `row` on, at most `count`, have the adapter of the first. */
static size_t with_same_adapter(size_t row, size_t count) {
  size_t same = 1;
  while (same < count && pass.span_of[row + same] &&
         pass.span_of[row + same]->adapter == pass.span_of[row]->adapter)
    same++;
  return same;
}

/* Adds the adapters' terms of rows [row, row + count) to a group of columns. */
static void add_adapters(const Product *p, size_t row, size_t count, size_t group,
                         float out[][LINE]) {
  for (size_t r = 0, same = 1; r < count; r += same, same = 1) {
    if (!pass.span_of[row + r]) continue;
    const Change *change = change_of(pass.span_of[row + r]->adapter, p->adapted);
    same = with_same_adapter(row + r, count - r);
    for (size_t i = r; change->rank && i < r + same; i++) add_low_rank(change, row + i, group, out[i]);
    if (change->bits) {
      const size_t bytes = rest_group_bytes(p->k, change->bits);
      kernels->add_rest(&p->coarse, row + r, same, (const uint8_t *)change->rest + group * bytes,
                        change->bits, out + r);
    }
    for (size_t i = r; change->bias && i < r + same; i++)
      for (size_t c = 0; c < LINE; c++) out[i][c] += change->bias[group * LINE + c];
  }
}

/* Prefetches what add_adapters will read of a group: each adapter is a stream of its own, too many for
   the hardware's prefetchers. */
static void prefetch_adapters(const Product *p, size_t group) {
  const size_t count = pass.num_spans < FEW ? pass.num_spans : FEW;
  for (const Span *span = pass.spans; span < pass.spans + count; span++) {
    const Change *change = change_of(span->adapter, p->adapted);
    const size_t bytes = float_group_bytes(change->rank);
    const char *packed = (const char *)change->up + group * bytes;
    for (size_t at = 0; at < bytes && at < 2048; at += 64) __builtin_prefetch(packed + at);
    if (change->bias) __builtin_prefetch(change->bias + group * LINE);
    if (!change->bits) continue;
    const char *rest = (const char *)change->rest + group * rest_group_bytes(p->k, change->bits);
    for (size_t at = 0; at < REST_PREFETCH; at += 64) __builtin_prefetch(rest + at);
  }
}

/* Adds what comes behind a tile of a product, and writes it. */
static void finish_tile(const Product *p, size_t row, size_t count, size_t group,
                        float out[][LINE]) {
  if (pass.num_spans) add_adapters(p, row, count, group, out);
  if (p->gelu) kernels->gelu(out[0], count * LINE, pass.model->gelu_tanh);
  for (size_t r = 0; r < count; r++) {
    const size_t at = (row + r) * p->y_stride + group * LINE;
    if (p->residual)
      for (size_t c = 0; c < LINE; c++) out[r][c] += p->residual[at + c];
    memcpy(p->y + at, out[r], sizeof *out);
  }
}

/* Job part: multiplies all rows with some groups of columns; each tile of rows with all these groups. */
static void multiply_part(void *data, size_t part, int thread) {
  const Product *p = data;
  const int int8 = pass.model->int8;
  const size_t groups = ceil_div(p->n, LINE), first = part * p->groups_at_once;
  const size_t last = first + p->groups_at_once < groups ? first + p->groups_at_once : groups;
  const size_t bytes = group_bytes(p->k, int8), most = int8 ? kernels->groups : 1;
  (void)thread;
  if (pass.num_spans) prefetch_adapters(p, first);
  for (size_t row = 0, done = 0; row < p->count; row += done)
    for (size_t group = first, count; group < last; group += count) {
      const uint8_t *packed = (const uint8_t *)p->matrix->weight + group * bytes;
      float biases[MAX_GROUPS * LINE] = {0}, out[MAX_GROUPS][MAX_ROWS][LINE];
      count = last - group < most ? last - group : most;
      if (p->matrix->bias)
        memcpy(biases, p->matrix->bias + group * LINE, count * LINE * sizeof *biases);
      for (size_t r = row; r < p->count && r < row + MAX_ROWS; r++) /* written below */
        __builtin_prefetch(p->y + r * p->y_stride + group * LINE, 1);
      if (int8)
        done = kernels->int8_tile(&p->quantized, row, packed, count, bytes, biases, out);
      else
        done = kernels->float_tile(p->x + row * p->stride, p->count - row, p->stride, p->k,
                                   (const float *)packed, biases, out[0]);
      for (size_t g = 0; g < count; g++) finish_tile(p, row, done, group + g, out[g]);
    }
  if (kernels->end_tiles) kernels->end_tiles();
}

/* y (count, padded n) = x (count, k) W^T + bias and what adapters add, with `residual` added, or
   through GELU. */
static void multiply(const Matrix *matrix, Adapted adapted, int normed, const float *x,
                     size_t stride, const float *residual, float *y, size_t y_stride, size_t count,
                     size_t k, size_t n, int gelu) {
  const int int8 = pass.model->int8;
  Product product = {.matrix = matrix, .x = x, .residual = residual, .y = y, .count = count,
                     .stride = stride, .y_stride = y_stride, .k = k, .n = n,
                     .groups_at_once = n > 10000 ? HEAD_GROUPS : GROUPS,
                     .normed = normed, .gelu = gelu, .adapted = adapted};
  if (int8) {
    const size_t rows = whole_tiles(count), width = whole_depths(k);
    float *scales = pass.quantized;
    int32_t *sums = (int32_t *)(scales + rows);
    product.quantized =
        (Quantized){count, width, count >= kernels->tiles_from, sums + rows, scales, sums};
    product.quantize_parts = ceil_div(count, BESIDE);
    scales = pass.coarse;
    if (scales)
      product.coarse = (Coarse){width, (int8_t *)(scales + 2 * count), scales, (int32_t *)scales + count};
  }
  in_parallel_if(pass.num_spans || count > FEW, prepare_part, &product,
                 product.quantize_parts + pass.num_spans);
  in_parallel(multiply_part, &product,
              ceil_div(ceil_div(product.n, LINE), product.groups_at_once));
}

/* --- LayerNorm ----------------------------------------------------------------------------------- */

typedef struct {
  const float *x;
  float *y;
  size_t count;
  Norm norm;
} Normalization;

static void normalize_part(void *data, size_t part, int thread) {
  const Normalization *n = data;
  const Model *m = pass.model;
  const size_t stride = pass.row;
  (void)thread;
  for (size_t i = part * BESIDE; i < n->count && i < (part + 1) * BESIDE; i++) {
    const float *x = n->x + i * stride;
    float *y = n->y + i * stride;
    if (!m->int8) {
      kernels->layer_norm(x, m->units, n->norm, m->epsilon, y);
      continue;
    }
    /* Only the head's norm: the embedding that the head may share has no gamma and beta in it. */
    const Span *span = pass.num_spans ? pass.span_of[i] : NULL;
    const Norm norm = span && span->adapter->final_norm.gamma ? span->adapter->final_norm : n->norm;
    const float scale = kernels->rms_scale(x, m->units, m->epsilon);
    for (size_t c = 0; c < stride; c++) y[c] = x[c] * scale;
    kernels->rotate(y, m->units, 1);
    for (size_t c = 0; c < stride; c++) y[c] = y[c] * norm.gamma[c] + norm.beta[c];
    kernels->rotate(y, m->units, 1);
  }
}

static void normalize(const float *x, float *y, size_t count, Norm norm) {
  Normalization work = {x, y, count, norm};
  in_parallel_if(count > FEW, normalize_part, &work, ceil_div(count, BESIDE));
}

/* Multiplies after a LayerNorm, which in int8 is in the matrix but for its scale. */
static void multiply_normed(Norm norm, const Matrix *matrix, Adapted adapted, float *y,
                            size_t y_stride, size_t n, int gelu) {
  const Model *m = pass.model;
  if (!m->int8) normalize(pass.x, pass.h, pass.tokens, norm);
  multiply(matrix, adapted, m->int8, m->int8 ? pass.x : pass.h, pass.row, NULL, y, y_stride,
           pass.tokens, m->units, n, gelu);
}

/* --- Attention ----------------------------------------------------------------------------------- */

/* Where the keys of a head are on a row's page. In a page, each layer has the keys of all heads, then
   the values of all heads: what a row's heads read lies beside each other. */
static uint8_t *keys_of(const Piece *piece, size_t position, size_t head) {
  const Model *m = pass.model;
  const size_t page = piece->pages[position / PAGE_TOKENS];
  const size_t heads = (page * m->num_layers + pass.layer) * 2 * m->heads + head;
  return pass.arena + heads * pass.head_bytes;
}

/* The heads of one part of attention; a run has pass.head_groups parts. */
typedef struct {
  const Run *run;
  size_t first, last;
} Heads;

static Heads heads_of(size_t part) {
  const size_t heads = pass.model->heads, group = part % pass.head_groups;
  return (Heads){&pass.runs[part / pass.head_groups], group * heads / pass.head_groups,
                 (group + 1) * heads / pass.head_groups};
}

/* Job part: writes the keys and values of some heads of a run to their pages. */
static void store_part(void *data, size_t part, int thread) {
  const Model *m = pass.model;
  const Heads heads = heads_of(part);
  const Run *run = heads.run;
  const size_t size = m->units / m->heads, stride = wide_row(3 * m->units);
  (void)data, (void)thread;
  for (size_t head = heads.first; head < heads.last; head++) {
    const float *k = pass.qkv + run->token * stride + m->units + head * size;
    for (size_t at = run->position; at < run->position + run->count; at++, k += stride) {
      for (size_t i = 0; i < size; i += LINE) { /* too long a stride for hardware prefetchers */
        __builtin_prefetch(k + AHEAD * stride + m->units + i);
        __builtin_prefetch(k + AHEAD * stride + i);
      }
      uint8_t *keys = keys_of(run->piece, at, head);
      kernels->store_kv(m->int8, k, k + m->units, size, at % PAGE_TOKENS, keys,
                        keys + m->heads * pass.head_bytes);
    }
  }
}

static void attend_part(void *data, size_t part, int thread) {
  const Model *m = pass.model;
  const Heads heads = heads_of(part);
  const Run *run = heads.run;
  const size_t size = m->units / m->heads, stride = wide_row(3 * m->units);
  const size_t at_once = run->count <= FEW_QUERIES ? heads.last - heads.first : 1;
  const uint8_t **pages = pass.pages + thread * pass.max_pages;
  float *scores = pass.scores + thread * pass.scores_size;
  if (!pass.is_stored) store_part(data, part, thread);
  for (size_t head = heads.first; head < heads.last; head += at_once) {
    for (size_t at = 0; at < run->position + run->count; at += PAGE_TOKENS)
      pages[at / PAGE_TOKENS] = keys_of(run->piece, at, head);
    const Queries queries = {pass.qkv + run->token * stride + head * size,
                             pages,
                             at_once,
                             size,
                             pass.head_bytes,
                             m->heads * pass.head_bytes,
                             stride,
                             pass.row,
                             run->position,
                             m->max_length,
                             m->layers[pass.layer].attention_scale,
                             m->int8};
    float *out = pass.attended + run->token * pass.row + head * size;
    for (size_t i = 0; i < run->count;)
      i += kernels->attend(&queries, i, run->count - i, scores, out + i * pass.row);
  }
}

static void attend(void) {
  const size_t parts = pass.num_runs * pass.head_groups;
  /* If a piece has several runs, the later ones need the keys and values of those before them. */
  pass.is_stored = pass.num_runs > pass.num_pieces;
  if (pass.is_stored) in_parallel(store_part, NULL, parts);
  in_parallel(attend_part, NULL, parts);
}

/* --- The pass ------------------------------------------------------------------------------------ */

static float read_number(const void *source, SourceType type, size_t i) {
  if (type == SOURCE_FLOAT32) return ((const float *)source)[i];
  if (type == SOURCE_FLOAT64) return (float)((const double *)source)[i];
  const uint32_t half = ((const uint16_t *)source)[i];
  uint32_t bits = half << 16; /* bfloat16 */
  float value;
  if (type == SOURCE_FLOAT16) {
    const uint32_t magnitude = half & 0x7fff;
    bits = magnitude << 13;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f; /* also for subnormal numbers */
    memcpy(&bits, &value, 4);
    if (magnitude >= 0x7c00) bits |= 0x7f800000; /* infinity and NaN */
    bits |= (half & 0x8000) << 16;
  }
  memcpy(&value, &bits, 4);
  return value;
}

/* Number i of a column in few bits, see product.h. `rest`: the column's group; lane: its place there. */
static int few_bits(const uint8_t *rest, int bits, size_t lane, size_t i) {
  const uint8_t *depth = rest + i / DEPTH * rest_depth_bytes(bits);
  const size_t four = i % DEPTH / 4, byte = lane * 4 + i % 4;
  int number = 0;
  if (bits & 2) {
    number = depth[four / 4 * 4 * LINE + byte] >> four % 4 * 2 & 3;
    depth += rest_depth_bytes(2);
  }
  if (bits & 1) number = 2 * number + (depth[four / 8 * 4 * LINE + byte] >> four % 8 & 1);
  return 2 * number - ((1 << bits) - 1);
}

/* Unpacks column `column`, of k numbers, of a packed matrix, such as a token's embedding. */
static void look_up(const void *packed, int int8, size_t column, size_t k, float *row) {
  const size_t lane = column % LINE;
  const uint8_t *group = (const uint8_t *)packed + column / LINE * group_bytes(k, int8);
  if (!int8) {
    const float *numbers = (const float *)group;
    for (size_t i = 0; i < k; i++) row[i] = numbers[i * LINE + lane];
    return;
  }
  const float *scales = (const float *)(group + LINE * whole_depths(k));
  const int zero = 128 + ((const int32_t *)(scales + LINE))[lane];
  for (size_t i = 0; i < k; i++)
    row[i] = ((int)group[i / 4 * 4 * LINE + lane * 4 + i % 4] - zero) * scales[lane];
}

/* Unpacks the embedding of a token that the model does not have. */
static void look_up_more(const Adapter *adapter, size_t number, float *row) {
  const size_t k = pass.model->units, lane = number % LINE;
  const uint16_t *group = (const uint16_t *)adapter->more_embedding + (number - lane) * k;
  for (size_t i = 0; i < k; i++) row[i] = read_number(group, SOURCE_FLOAT16, i * LINE + lane);
}

/* Adds what an adapter adds to a row of the embedding. */
static void add_looked_up(const Change *change, size_t column, float *low, float *row) {
  const size_t k = pass.model->units, rank = change->rank, lane = column % LINE;
  const size_t group = column / LINE, bytes = rest_group_bytes(k, change->bits);
  const uint16_t *up = (const uint16_t *)change->up + group * rank * LINE;
  for (size_t r = 0; r < rank; r++) low[r] = read_number(up, SOURCE_FLOAT16, r * LINE + lane);
  for (size_t i = 0; rank && i < k; i += LINE)
    kernels->add_product(1, low, rank, (const uint16_t *)change->down + i * rank, row + i);
  if (!change->bits) return;
  const uint8_t *rest = (const uint8_t *)change->rest + group * bytes;
  const float scale = ((const float *)(rest + bytes) - LINE)[lane];
  for (size_t i = 0; i < k; i++) row[i] += (float)few_bits(rest, change->bits, lane, i) * scale;
}

static void add_position(const Adapter *adapter, size_t position, float *row) {
  const float one = 1, *x = pass.model->positions + position * pass.row;
  if (!adapter || !adapter->positions)
    for (size_t i = 0; i < pass.row; i++) row[i] += x[i];
  else
    for (size_t i = 0; i < pass.row; i += LINE)
      kernels->add_product(1, &one, 1, adapter->positions + position * pass.row + i, row + i);
}

/* Subtracts the mean of a rotated row. A vector of equal numbers, rotated, has one number at each multiple
   of the largest power of two in its size, and zeros between them. */
static void center(float *x, size_t units) {
  const size_t step = units & -units;
  float sum = 0;
  for (size_t i = 0; i < units; i += step) sum += x[i];
  const float mean = sum / (units / step);
  for (size_t i = 0; i < units; i += step) x[i] -= mean;
}

static void embed_part(void *data, size_t part, int thread) {
  const Model *m = pass.model;
  const Run *run = &pass.runs[part];
  (void)data, (void)thread;
  for (size_t i = 0; i < run->count; i++) {
    float *x = pass.x + (run->token + i) * pass.row;
    const int32_t id = run->piece->ids[run->position + i - run->piece->position];
    const Adapter *adapter = run->piece->adapter;
    if (id >= m->vocab) {
      look_up_more(adapter, id - m->vocab, x);
    } else {
      look_up(m->embedding, m->int8, id, m->units, x);
      if (adapter)
        add_looked_up(&adapter->embedding, id, pass.down + (run->token + i) * pass.down_row, x);
    }
    add_position(adapter, run->position + i, x);
    for (size_t c = m->units; c < pass.row; c++) x[c] = 0;
    if (m->int8) center(x, m->units);
  }
}

static void compute_layer(const Layer *layer, double *time) {
  const Model *m = pass.model;
  const size_t T = pass.tokens, C = m->units, F = m->hidden, row = pass.row;
  multiply_normed(layer->attention_norm, &layer->qkv, QKV, pass.qkv, wide_row(3 * C), 3 * C, 0);
  count_time(PRODUCTS_TIME, time);
  attend();
  count_time(ATTENTION_TIME, time);
  multiply(&layer->attention_out, ATTENTION_OUT, 0, pass.attended, row, pass.x, pass.x, row, T, C, C,
           0);
  multiply_normed(layer->ffn_norm, &layer->ffn_hidden, FFN_HIDDEN, pass.hidden, wide_row(F), F, 1);
  multiply(&layer->ffn_out, FFN_OUT, 0, pass.hidden, wide_row(F), pass.x, pass.x, row, T, F, C, 0);
  count_time(PRODUCTS_TIME, time);
}

static int changes_logits(const Adapter *adapter) {
  return adapter->head.rank || adapter->head.bits || adapter->final_norm.gamma || adapter->more;
}

/* The rows of a part of the pass: one for each token, for each that a head needs, for each with logits. */
typedef enum { TOKENS, OUTPUTS, LOGITS } Rows;

/* Finds the rows that have adapters. */
static void find_spans(Rows rows) {
  size_t row = 0;
  pass.num_spans = 0;
  for (const Piece *piece = pass.pieces; piece < pass.pieces + pass.num_pieces; piece++) {
    const Adapter *adapter = piece->adapter;
    int32_t count = rows == TOKENS ? piece->count : piece->num_logits;
    if (rows == LOGITS && piece->states) count = 0;
    if (rows != TOKENS && adapter && !changes_logits(adapter)) adapter = NULL;
    for (; count; count--, row++) {
      Span *last = pass.num_spans ? &pass.spans[pass.num_spans - 1] : NULL;
      const int follows = last && last->adapter == adapter && last->row + last->count == row;
      if (adapter && follows && last->count < RUN)
        last->count++;
      else if (adapter)
        pass.spans[pass.num_spans++] = (Span){adapter, row, 1};
      pass.span_of[row] = adapter ? &pass.spans[pass.num_spans - 1] : NULL;
    }
  }
}

/* Copies the rows of `h` that pieces take as states; returns how many are left, at the front of `h`. */
static size_t take_states(void) {
  size_t row = 0, left = 0;
  for (const Piece *piece = pass.pieces; piece < pass.pieces + pass.num_pieces; piece++) {
    const size_t count = piece->num_logits;
    float *h = pass.h + row * pass.row;
    row += count;
    if (!piece->states) {
      memmove(pass.h + left * pass.row, h, count * pass.row * sizeof *h);
      left += count;
      continue;
    }
    for (size_t r = 0; pass.model->int8 && r < count; r++)
      kernels->rotate(h + r * pass.row, pass.model->units, 1);
    memcpy(piece->states, h, count * pass.row * sizeof *h);
  }
  return left;
}

static size_t logits_row(void) { return padded(pass.model->vocab + pass.more); }

/* Job part: the logits of a span's rows for some groups of tokens that the model does not have. */
static void more_part(void *data, size_t part, int thread) {
  const Model *m = pass.model;
  const Span *span = &pass.spans[part % pass.num_spans];
  const size_t more = span->adapter->more, first = part / pass.num_spans * HEAD_GROUPS * LINE;
  const size_t bytes = float_group_bytes(m->units) / LINE;
  (void)thread;
  for (size_t at = first; at < more && at < first + HEAD_GROUPS * LINE; at += LINE)
    for (size_t row = span->row; row < span->row + span->count; row++) {
      const size_t count = more - at < LINE ? more - at : LINE;
      float out[LINE] = {0};
      kernels->add_product(m->int8, pass.h + row * pass.row, m->units,
                           (const uint8_t *)span->adapter->more_head + at * bytes, out);
      memcpy((float *)data + row * logits_row() + m->vocab + at, out, count * sizeof *out);
    }
}

/* Computes the logits or states of the tokens that require them; their rows move to the front of `x` and
   `h`. */
static void compute_logits(float *logits, double *time) {
  const Model *m = pass.model;
  size_t token = 0, wanted = 0;
  for (size_t i = 0; i < pass.num_pieces; i++) {
    const Piece *piece = &pass.pieces[i];
    token += piece->count;
    const size_t first = token - piece->num_logits;
    memmove(pass.x + wanted * pass.row, pass.x + first * pass.row,
            piece->num_logits * pass.row * sizeof(float));
    wanted += piece->num_logits;
  }
  find_spans(OUTPUTS);
  if (wanted) {
    normalize(pass.x, pass.h, wanted, m->final_norm);
    wanted = take_states();
    find_spans(LOGITS);
  }
  if (wanted)
    multiply(&m->head, HEAD, 0, pass.h, pass.row, NULL, logits, logits_row(), wanted, m->units,
             m->vocab, 0);
  if (wanted && pass.more)
    in_parallel(more_part, logits,
                pass.num_spans * ceil_div(ceil_div(pass.more, LINE), HEAD_GROUPS));
  count_time(HEAD_TIME, time);
}

static int is_vocab(int32_t vocab, int32_t more) {
  return more >= 0 && vocab <= MAX_VOCAB && more <= MAX_VOCAB - vocab;
}

static int is_model(const Model *m) {
  const int32_t most = 1 << 16; /* sums of so many numbers fit into 32 bits, see largest_number */
  return m->num_layers >= 1 && m->units >= 1 && m->heads >= 1 && m->hidden >= 1 && m->vocab >= 1 &&
         m->max_length >= 1 && m->num_layers <= most && m->units <= most && m->hidden <= most &&
         is_vocab(m->vocab, 0) && m->max_length <= most && m->units % m->heads == 0;
}

/* What the adapters of a pass need memory for. */
typedef struct {
  int32_t rank, more; /* the largest */
  int has_rest;
} Widest;

static int is_change(const Model *m, const Change *change, int is_of_layer, Widest *widest) {
  if (change->rank < 0 || change->rank > MAX_RANK || change->bits < 0 || change->bits > 3) return 0;
  if (change->rank > widest->rank) widest->rank = change->rank;
  if (change->bits) widest->has_rest = 1;
  return m->int8 || !(change->bits || (change->rank && !is_of_layer));
}

static int is_adapter(const Model *m, const Adapter *adapter, Widest *widest) {
  if (!adapter) return 1;
  int right = is_change(m, &adapter->embedding, 0, widest) &&
              is_change(m, &adapter->head, 0, widest) && is_vocab(m->vocab, adapter->more) &&
              (m->int8 || !(adapter->positions || adapter->final_norm.gamma || adapter->more));
  if (adapter->more > widest->more) widest->more = adapter->more;
  for (const AdapterLayer *layer = adapter->layers; layer < adapter->layers + m->num_layers; layer++)
    right = right && is_change(m, &layer->qkv, 1, widest) &&
            is_change(m, &layer->attention_out, 1, widest) &&
            is_change(m, &layer->ffn_hidden, 1, widest) && is_change(m, &layer->ffn_out, 1, widest);
  return right;
}

static int is_piece(const Model *m, const Piece *piece) {
  if (piece->count < 1 || piece->position < 0 || piece->num_logits < 0 ||
      piece->num_logits > piece->count || piece->count > m->max_length - piece->position)
    return 0;
  const int32_t more = piece->adapter ? piece->adapter->more : 0;
  for (int32_t i = 0; i < piece->count; i++)
    if (piece->ids[i] < 0 || piece->ids[i] >= m->vocab + more) return 0;
  return 1;
}

size_t page_bytes(const Model *m) {
  const size_t size = padded(m->units / m->heads);
  const size_t token = m->int8 ? size + sizeof(float) : size * sizeof(float); /* of a head's keys */
  return 2 * PAGE_TOKENS * token * m->heads * m->num_layers;
}

/* Places the pass's arrays one behind the other in `memory`; returns their bytes. */
static size_t place(const Model *m, size_t count, size_t wanted, size_t length, size_t rank,
                    int has_rest, uint8_t *memory) {
  const size_t row = padded(m->units), threads = num_threads();
  const size_t widest = m->hidden > m->units ? m->hidden : m->units;
  const size_t more = count > wanted ? count : wanted;
  size_t bytes = 0;
#define PLACE(field, size)                            \
  pass.field = memory ? (void *)(memory + bytes) : NULL; \
  bytes += padded(size) * sizeof(float)
  pass.row = row;
  pass.max_pages = ceil_div(length, PAGE_TOKENS);
  const size_t queries = m->heads * FEW_QUERIES > MAX_QUERIES ? m->heads * FEW_QUERIES : MAX_QUERIES;
  pass.scores_size = attend_floats(queries, pass.max_pages * PAGE_TOKENS, m->units / m->heads);
  pass.down_row = padded(rank);
  PLACE(x, count * row);
  PLACE(h, (m->int8 ? wanted : more) * row);
  PLACE(qkv, count * wide_row(3 * m->units) + LINE);
  PLACE(attended, count * row);
  PLACE(hidden, count * wide_row(m->hidden));
  PLACE(scores, threads * pass.scores_size);
  PLACE(pages, threads * (pass.max_pages + 1) * 2);
  PLACE(rotated, m->int8 ? threads * padded(m->hidden) : 0);
  PLACE(quantized, m->int8 ? quantized_bytes(more, widest) / sizeof(float) : 0);
  PLACE(runs, (count + 1) * sizeof(Run) / sizeof(float));
  PLACE(spans, (count + 1) * sizeof(Span) / sizeof(float));
  PLACE(span_of, (count + 1) * 2);
  PLACE(down, count * padded(rank));
  PLACE(coarse, has_rest ? coarse_bytes(more, widest) / sizeof(float) : 0);
  if (!has_rest) pass.coarse = NULL;
#undef PLACE
  return bytes;
}

size_t scratch_bytes(const Model *m, size_t count, size_t wanted, size_t length, size_t rank,
                     int has_rest) {
  return place(m, count, wanted, length, rank, has_rest, NULL);
}

void release_scratch(void) {
  if (scratch.memory) munmap(scratch.memory, scratch.bytes);
  scratch.memory = NULL;
  scratch.bytes = 0;
}

/* Makes the scratch memory at least so large. Returns 0 without memory. */
static int reserve(size_t bytes) {
  if (bytes <= scratch.bytes) return 1;
  release_scratch();
  void *memory =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 0;
  madvise(memory, bytes, MADV_HUGEPAGE); /* a prompt's rows are on thousands of small pages */
  scratch.memory = memory;
  scratch.bytes = bytes;
  return 1;
}

PassStatus run_pass(const Model *model, uint8_t *arena, const Piece *pieces, size_t num_pieces,
                    float *logits) {
  double time = now();
  size_t count = 0, wanted = 0, length = 0;
  Widest widest = {0};
  if (!is_model(model)) return PASS_BAD_MODEL;
  for (size_t i = 0; i < num_pieces; i++) {
    if (!is_adapter(model, pieces[i].adapter, &widest) || !is_piece(model, &pieces[i]))
      return PASS_BAD_PIECE;
    const size_t end = (size_t)pieces[i].position + pieces[i].count;
    count += pieces[i].count;
    wanted += pieces[i].num_logits;
    length = end > length ? end : length;
  }
  const size_t rank = widest.rank;
  if (!reserve(scratch_bytes(model, count, wanted, length, rank, widest.has_rest)))
    return PASS_NO_MEMORY;
  begin_parallel();
  place(model, count, wanted, length, rank, widest.has_rest, scratch.memory);
  pass.model = model;
  pass.arena = arena;
  pass.pieces = pieces;
  pass.num_pieces = num_pieces;
  pass.tokens = count;
  pass.more = widest.more;
  pass.head_bytes = page_bytes(model) / model->num_layers / model->heads / 2;
  pass.num_runs = 0;
  size_t token = 0;
  for (size_t i = 0; i < num_pieces; i++) {
    size_t position = pieces[i].position, left = pieces[i].count;
    for (size_t taken; left; left -= taken, position += taken, token += taken) {
      taken = left < RUN ? left : RUN;
      pass.runs[pass.num_runs++] = (Run){&pieces[i], token, position, taken};
    }
  }
  find_spans(TOKENS);
  /* Parts of many heads read memory faster; enough parts keep all threads busy if rows differ. */
  pass.head_groups = THREAD_PARTS * num_threads() / (pass.num_runs + 1) + 1;
  if (pass.head_groups > (size_t)model->heads) pass.head_groups = model->heads;
  in_parallel(embed_part, NULL, pass.num_runs);
  count_time(EMBEDDING_TIME, &time);
  for (pass.layer = 0; pass.layer < model->num_layers; pass.layer++)
    compute_layer(&model->layers[pass.layer], &time);
  compute_logits(logits, &time);
  end_parallel();
  return PASS_OK;
}

/* --- Packing ------------------------------------------------------------------------------------- */

/* The numbers of one column of a matrix to pack. */
typedef struct {
  const void *source;
  SourceType type;
  size_t begin, stride, count;
} Column;

static float number_of(const Column *column, size_t i) {
  if (i >= column->count) return 0;
  return read_number(column->source, column->type, column->begin + i * column->stride);
}

static int32_t round_number(float x) {
  const float shifted = x + 12582912.0f; /* 1.5 * 2^23: the last bits are the integer */
  int32_t bits;
  memcpy(&bits, &shifted, 4);
  return bits - 0x4b400000;
}

/* Quantizes a column of k numbers to int8, as product.h has it: its range takes all 256 numbers. */
static void pack_int8(const Column *column, size_t k, size_t lane, uint8_t *packed) {
  const size_t width = whole_depths(k);
  float lowest = 0, highest = 0;
  for (size_t i = 0; i < k; i++) {
    const float number = number_of(column, i);
    lowest = number < lowest ? number : lowest;
    highest = number > highest ? number : highest;
  }
  const float largest = highest > -lowest ? highest : -lowest;
  const float range = (highest - lowest) / 254, least = largest / LARGEST_WEIGHT;
  const float scale = range > least ? range : least, times = scale > 0 ? 1 / scale : 0;
  const int32_t zero = -((round_number(lowest * times) + round_number(highest * times) + 1) >> 1);
  for (size_t i = 0; i < width; i++)
    packed[i / 4 * 4 * LINE + lane * 4 + i % 4] =
        (uint8_t)(round_number(number_of(column, i) * times) + 128 + zero);
  memcpy(packed + LINE * width + lane * sizeof scale, &scale, sizeof scale);
  memcpy(packed + LINE * (width + sizeof scale) + lane * sizeof zero, &zero, sizeof zero);
}

void pack(const void *source, SourceType type, size_t column_stride, size_t stride, size_t n,
          size_t k, int int8, uint8_t *packed) {
  for (size_t c = 0; c < padded(n); c++) {
    uint8_t *group = packed + c / LINE * group_bytes(k, int8);
    const Column column = {source, type, c * column_stride, stride, c < n ? k : 0};
    if (int8)
      pack_int8(&column, k, c % LINE, group);
    else
      for (size_t i = 0; i < k; i++) ((float *)group)[i * LINE + c % LINE] = number_of(&column, i);
  }
}

/* Rounds down and limits to 0 to `most`: as an integer, because a branch on random numbers is slow. No x is
   larger than sqrt(k) times the column's root mean square, so the integer holds it. */
static inline int in_few_bits(float x, float per_step, int most) {
  const int number = (int)(x * per_step + (float)(most + 1) / 2);
  return number < 0 ? 0 : number > most ? most : number;
}

/* Adds to each lane's square and product what `count` of LINE numbers have of them: x * x, and x times what
   it is rounded to. A whole line becomes vectors. */
static inline void add_line(const float *x, size_t count, float per_step, int most, float *squares,
                            float *products) {
  for (size_t lane = 0; lane < count; lane++) {
    squares[lane] += x[lane] * x[lane];
    products[lane] += x[lane] * (float)(2 * in_few_bits(x[lane], per_step, most) - most);
  }
}

/* Returns the sum of x * x of k numbers; in `product` that of x times what it is rounded to. */
static double sums(const float *x, size_t k, float per_step, int most, double *product) {
  float squares[LINE] = {0}, products[LINE] = {0};
  double square = 0;
  size_t i = 0;
  for (; i + LINE <= k; i += LINE) add_line(x + i, LINE, per_step, most, squares, products);
  add_line(x + i, k - i, per_step, most, squares, products);
  *product = 0;
  for (size_t lane = 0; lane < LINE; lane++) {
    square += (double)squares[lane];
    *product += (double)products[lane];
  }
  return square;
}

/* Returns 1 / (2 step) of the step that is best for k numbers of a normal distribution, and the scale that
   they have when they are rounded: the one with which their product with x is that of x itself. The nearest
   by least squares is smaller, and takes from a fine-tune some of what it learned. */
static float few_bits_step(const float *x, size_t k, int bits, float *scale) {
  static const float normal_step[] = {0, 0.7979f, 0.4979f, 0.2930f};
  const int most = (1 << bits) - 1;
  double product;
  const double square = sums(x, k, 0, most, &product);
  const float step = normal_step[bits] * (float)sqrt(square / (double)k);
  const float per_step = step > 0 ? 1 / (2 * step) : 0;
  sums(x, k, per_step, most, &product);
  *scale = product > 0 ? (float)(square / product) : 0;
  return per_step;
}

/* Writes DEPTH numbers of a column in few bits, as few_bits reads them: the bytes of whole words at once. */
static void write_few_bits(uint8_t *depth, int bits, size_t lane, const uint8_t *numbers) {
  uint32_t fours[DEPTH / 4];
  memcpy(fours, numbers, sizeof fours);
  if (bits & 2) {
    for (size_t part = 0; part < DEPTH / 16; part++) {
      uint32_t word = 0;
      for (size_t i = 0; i < 4; i++)
        word |= (fours[part * 4 + i] >> (bits & 1) & 0x03030303u) << 2 * i;
      memcpy(depth + (part * LINE + lane) * 4, &word, sizeof word);
    }
    depth += rest_depth_bytes(2);
  }
  for (size_t part = 0; bits & 1 && part < DEPTH / 32; part++) {
    uint32_t word = 0;
    for (size_t i = 0; i < 8; i++) word |= (fours[part * 8 + i] & 0x01010101u) << i;
    memcpy(depth + (part * LINE + lane) * 4, &word, sizeof word);
  }
}

void pack_rest(const float *source, size_t n, size_t k, int bits, uint8_t *packed) {
  const size_t bytes = rest_group_bytes(k, bits);
  const int most = (1 << bits) - 1;
  memset(packed, 0, rest_bytes(n, k, bits));
  for (size_t c = 0; c < n; c++, source += k) {
    uint8_t *group = packed + c / LINE * bytes;
    float *scales = (float *)(group + bytes) - LINE;
    const float per_step = few_bits_step(source, k, bits, &scales[c % LINE]);
    for (size_t begin = 0; begin < k; begin += DEPTH, group += rest_depth_bytes(bits)) {
      const size_t count = k - begin < DEPTH ? k - begin : DEPTH;
      uint8_t numbers[DEPTH] = {0};
      for (size_t i = 0; i < count; i++)
        numbers[i] = (uint8_t)in_few_bits(source[begin + i], per_step, most);
      write_few_bits(group, bits, c % LINE, numbers);
    }
  }
}

void unpack_int8(const uint8_t *packed, size_t n, size_t k, float *numbers) {
  for (size_t column = 0; column < n; column++) look_up(packed, 1, column, k, numbers + column * k);
}

void add_products(const float *w, const float *x, size_t n, size_t k, float *out) {
  for (size_t row = 0; row < n; row++, w += k) {
    double sum = out[row];
    for (size_t i = 0; i < k; i++) sum += (double)w[i] * (double)x[i];
    out[row] = (float)sum;
  }
}
