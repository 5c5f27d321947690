/* A pass of GPT-2 through all layers, in which no token depends on the other rows.

   Tokens are rows of matrices here: T of them, in the order of their pieces. Everything but attention
   treats each token by itself, and attention reads only the pages of the token's own row. So a
   token's result is the same, bit for bit, alone or beside others, in a prompt cut anywhere, and on
   any number of threads. Rows of one pass may have different adapters, or none.

   In shapes: C units, H heads of size S, F hidden units, V vocabulary; rows are padded (pass.h). */

#include "kernels.h"
#include "threads.h"

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
  MAX_RANK = 1 << 16 /* of an adapter */
};

/* Tokens of a piece that one thread attends for. */
typedef struct {
  const Piece *piece;
  size_t token, position, count; /* token: the first of them among the pass's */
} Run;

/* Tokens beside each other that have the same adapter. */
typedef struct {
  const AdapterLayer *adapter;
  size_t token, count;
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
  float *scores;      /* for each thread (queries, the longest row), their sums and weights */
  size_t scores_size; /* floats of `scores` for one thread */
  const uint8_t **pages; /* for each thread (pages of the longest row,) */
  size_t max_pages;
  void *quantized;    /* (T, max(C, F)) */
  Run *runs;
  size_t num_runs;
  Span *spans; /* of the tokens that have adapters */
  size_t num_spans;
  const AdapterLayer **adapters; /* (T,) */
  float *down;                   /* (T, R): what an adapter's first matrix makes of a product's x */
  size_t down_row;               /* R, the padded largest rank */
  int is_stored; /* the layer's new keys and values are on their pages */
} pass;

static struct {
  uint8_t *memory;
  size_t bytes;
} scratch;

static double times[5];
enum { EMBEDDING, PRODUCTS, ATTENTION, REST, HEAD };

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

static size_t group_bytes(size_t k, size_t block) {
  if (!block) return k * LINE * sizeof(float);
  return LINE * ceil_div(k, block) * (block + sizeof(float));
}

size_t packed_bytes(size_t n, size_t k, size_t block) {
  return ceil_div(n, LINE) * group_bytes(k, block);
}

/* The offset in AdapterLayer of the LowRank that is added to a product; NOT_ADAPTED: none. */
typedef enum {
  QKV = offsetof(AdapterLayer, qkv),
  ATTENTION_OUT = offsetof(AdapterLayer, attention_out),
  FFN_HIDDEN = offsetof(AdapterLayer, ffn_hidden),
  FFN_OUT = offsetof(AdapterLayer, ffn_out),
  NOT_ADAPTED = sizeof(AdapterLayer)
} Adapted;

typedef struct {
  const Matrix *matrix;
  const float *x, *residual;
  float *y;
  size_t count, stride, y_stride, k, n, groups_at_once, quantize_parts; /* y_stride: residual's, too */
  int gelu;
  Adapted adapted;
  Quantized quantized;
} Product;

/* Vectors of int8 numbers that `count` rows of floats are quantized to, whole tiles of them. */
static size_t num_vectors(size_t count, size_t planes) {
  return ceil_div(count * planes, MAX_ROWS) * MAX_ROWS;
}

static size_t quantized_bytes(size_t count, size_t planes, size_t k, size_t block) {
  const size_t vectors = num_vectors(count, planes), blocks = ceil_div(k, block);
  return vectors * blocks * (block + sizeof(float) + sizeof(int32_t));
}

static void quantize_block(const Product *product, size_t row, size_t b) {
  const Quantized *to = &product->quantized;
  const size_t planes = to->planes, block = to->block, begin = b * block, v = row * planes;
  const float *x = product->x + row * product->stride + begin;
  float line[MAX_BLOCK] = {0}, scale;
  int32_t *fours[2] = {NULL}, sums[2];
  size_t at[2];
  const size_t count = product->k - begin < block ? product->k - begin : block;
  if (count % LINE || count < block) x = memcpy(line, x, count * sizeof *x);
  for (size_t plane = 0; plane < planes; plane++) {
    const size_t vector = v + plane, n = to->beside;
    fours[plane] =
        n == BESIDE ? to->fours + vector / n * n * (to->width / 4) + begin / 4 * n + vector % n
                    : to->fours + ((vector / MAX_ROWS * to->blocks + b) * MAX_ROWS +
                                   vector % MAX_ROWS) * (block / 4);
    at[plane] = (vector / BESIDE * to->blocks + b) * BESIDE + vector % BESIDE;
  }
  kernels->quantize(x, block, planes, to->beside, fours, &scale, sums);
  for (size_t plane = 0; plane < planes; plane++) {
    to->scales[at[plane]] = scale;
    to->sums[at[plane]] = sums[plane];
  }
}

/* Job part: quantizes BESIDE rows, block by block, because their numbers share cache lines. */
static void quantize_part(void *data, size_t part, int thread) {
  const Product *product = data;
  (void)thread;
  for (size_t b = 0; b < product->quantized.blocks; b++)
    for (size_t row = part * BESIDE; row < product->count && row < (part + 1) * BESIDE; row++)
      quantize_block(product, row, b);
}

static const float no_bias[LINE];

static const LowRank *low_rank(const AdapterLayer *layers, Adapted part) {
  return (const LowRank *)((const char *)(layers + pass.layer) + part);
}

/* Bytes of a group of columns of an adapter's matrix. */
static size_t float_group_bytes(size_t k) {
  return k * LINE * (pass.model->block ? sizeof(uint16_t) : sizeof(float));
}

/* Job part: multiplies a span's rows of x with their adapter's first matrix. */
static void down_part(void *data, size_t part, int thread) {
  const Product *p = data;
  const Span *span = &pass.spans[part];
  const LowRank *low = low_rank(span->adapter, p->adapted);
  (void)thread;
  for (size_t column = 0; column < (size_t)low->rank; column += LINE) {
    const uint8_t *packed = (const uint8_t *)low->down + column / LINE * float_group_bytes(p->k);
    for (size_t row = span->token; row < span->token + span->count; row++) {
      float *down = pass.down + row * pass.down_row + column;
      memcpy(down, low->bias ? low->bias + column : no_bias, LINE * sizeof(float));
      kernels->add_product(pass.model->block != 0, p->x + row * p->stride, p->k, packed, down);
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

/* Adds the adapters' terms of rows [row, row + count) to a group of columns, and prefetches what the
   next group needs. */
static void add_adapters(const Product *p, size_t row, size_t count, size_t group,
                         float out[][LINE]) {
  for (size_t r = 0; r < count; r++) {
    if (!pass.adapters[row + r]) continue;
    const LowRank *low = low_rank(pass.adapters[row + r], p->adapted);
    if (!low->rank) continue;
    const size_t bytes = float_group_bytes(low->rank);
    const uint8_t *packed = (const uint8_t *)low->up + group * bytes;
    kernels->add_product(pass.model->block != 0, pass.down + (row + r) * pass.down_row, low->rank,
                         packed, out[r]);
    for (size_t at = 0; at < bytes && at < 2048; at += 64) __builtin_prefetch(packed + bytes + at);
  }
}

/* Prefetches what add_adapters will read of a group: each adapter is a stream of its own, too many for
   the hardware's prefetchers. */
static void prefetch_adapters(const Product *p, size_t group) {
  const size_t count = pass.num_spans < FEW ? pass.num_spans : FEW;
  for (const Span *span = pass.spans; span < pass.spans + count; span++) {
    const LowRank *low = low_rank(span->adapter, p->adapted);
    const size_t bytes = float_group_bytes(low->rank);
    const char *packed = (const char *)low->up + group * bytes;
    for (size_t at = 0; at < bytes && at < 2048; at += 64) __builtin_prefetch(packed + at);
  }
}

/* Job part: multiplies all rows with some groups of columns; each tile of rows with all these groups. */
static void multiply_part(void *data, size_t part, int thread) {
  const Product *p = data;
  const size_t groups = ceil_div(p->n, LINE), first = part * p->groups_at_once;
  const size_t last = first + p->groups_at_once < groups ? first + p->groups_at_once : groups;
  const size_t bytes = group_bytes(p->k, pass.model->block);
  const int adapted = p->adapted != NOT_ADAPTED && pass.num_spans;
  (void)thread;
  if (adapted) prefetch_adapters(p, first);
  for (size_t row = 0, done = 0; row < p->count; row += done)
    for (size_t group = first; group < last; group++) {
      const uint8_t *packed = (const uint8_t *)p->matrix->weight + group * bytes;
      const float *bias = p->matrix->bias ? p->matrix->bias + group * LINE : no_bias;
      float out[MAX_ROWS][LINE];
      for (size_t r = row; r < p->count && r < row + MAX_ROWS; r++) /* written below */
        __builtin_prefetch(p->y + r * p->y_stride + group * LINE, 1);
      if (pass.model->block)
        done = kernels->int8_tile(&p->quantized, row, packed, bias, out);
      else
        done = kernels->float_tile(p->x + row * p->stride, p->count - row, p->stride, p->k,
                                   (const float *)packed, bias, out);
      if (adapted) add_adapters(p, row, done, group, out);
      if (p->gelu) kernels->gelu(out[0], done * LINE, pass.model->gelu_tanh);
      for (size_t r = 0; r < done; r++) {
        const size_t at = (row + r) * p->y_stride + group * LINE;
        if (p->residual)
          for (size_t c = 0; c < LINE; c++) out[r][c] += p->residual[at + c];
        memcpy(p->y + at, out[r], sizeof *out);
      }
    }
  if (kernels->end_tiles) kernels->end_tiles();
}

/* y (count, padded n) = x (count, k) W^T + bias and what adapters add, with `residual` added, or
   through GELU. */
static void multiply(const Matrix *matrix, Adapted adapted, const float *x, size_t stride,
                     const float *residual, float *y, size_t y_stride, size_t count, size_t k,
                     size_t n, int gelu) {
  const size_t block = pass.model->block;
  const size_t spans = adapted == NOT_ADAPTED ? 0 : pass.num_spans;
  Product product = {.matrix = matrix, .x = x, .residual = residual, .y = y, .count = count,
                     .stride = stride, .y_stride = y_stride, .k = k, .n = n,
                     .groups_at_once = GROUPS, .gelu = gelu, .adapted = adapted};
  if (block) {
    const size_t blocks = ceil_div(k, block), planes = matrix->planes;
    const size_t vectors = num_vectors(count, planes);
    float *scales = pass.quantized;
    int32_t *sums = (int32_t *)(scales + vectors * blocks);
    product.quantized = (Quantized){
        count, planes, blocks * block, blocks, block,
        count * planes < kernels->tiles_from ? BESIDE : 1,
        sums + vectors * blocks, scales, sums};
    const size_t whole = count * planes / BESIDE * BESIDE;
    if (product.quantized.beside == 1) /* a tile may have vectors beyond the last row */
      memset(scales + whole * blocks, 0, (vectors - whole) * blocks * sizeof *scales);
    product.quantize_parts = ceil_div(product.count, BESIDE);
  }
  in_parallel_if(spans || count > FEW, prepare_part, &product, product.quantize_parts + spans);
  if (n > 10000) product.groups_at_once = HEAD_GROUPS;
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
  const size_t stride = pass.row;
  (void)thread;
  for (size_t i = part * BESIDE; i < n->count && i < (part + 1) * BESIDE; i++)
    kernels->layer_norm(n->x + i * stride, pass.model->units, n->norm, pass.model->epsilon,
                        n->y + i * stride);
}

static void normalize(const float *x, float *y, size_t count, Norm norm) {
  Normalization work = {x, y, count, norm};
  in_parallel_if(count > FEW, normalize_part, &work, ceil_div(count, BESIDE));
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
      kernels->store_kv(m->block != 0, k, k + m->units, size, at % PAGE_TOKENS, keys,
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
                             m->heads * padded(size) * PAGE_TOKENS,
                             stride,
                             pass.row,
                             run->position,
                             m->layers[pass.layer].attention_scale,
                             m->block != 0};
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

/* Unpacks column `column`, of k numbers, of a packed matrix, such as a token's embedding. */
static void look_up(const void *packed, size_t column, size_t k, float *row) {
  const size_t block = pass.model->block, lane = column % LINE;
  const uint8_t *group = (const uint8_t *)packed + column / LINE * group_bytes(k, block);
  if (!block) {
    const float *numbers = (const float *)group;
    for (size_t i = 0; i < k; i++) row[i] = numbers[i * LINE + lane];
    return;
  }
  for (size_t i = 0; i < k; group += LINE * (block + sizeof(float))) {
    const float scale = ((const float *)(group + LINE * block))[lane];
    for (const size_t begin = i; i < begin + block && i < k; i++) {
      const size_t j = i - begin;
      row[i] = ((int)group[j / 4 * 4 * LINE + lane * 4 + j % 4] - 128) * scale;
    }
  }
}

static void embed_part(void *data, size_t part, int thread) {
  const Model *m = pass.model;
  const Run *run = &pass.runs[part];
  (void)data, (void)thread;
  for (size_t i = 0; i < run->count; i++) {
    float *x = pass.x + (run->token + i) * pass.row;
    const float *position = m->positions + (run->position + i) * pass.row;
    look_up(m->embedding, run->piece->ids[run->position + i - run->piece->position], m->units, x);
    for (size_t c = 0; c < (size_t)m->units; c++) x[c] += position[c];
    for (size_t c = m->units; c < pass.row; c++) x[c] = 0;
  }
}

static void compute_layer(const Layer *layer, double *time) {
  const Model *m = pass.model;
  const size_t T = pass.tokens, C = m->units, F = m->hidden, row = pass.row;
  normalize(pass.x, pass.h, T, layer->attention_norm);
  count_time(REST, time);
  multiply(&layer->qkv, QKV, pass.h, row, NULL, pass.qkv, wide_row(3 * C), T, C, 3 * C, 0);
  count_time(PRODUCTS, time);
  attend();
  count_time(ATTENTION, time);
  multiply(&layer->attention_out, ATTENTION_OUT, pass.attended, row, pass.x, pass.x, row, T, C, C, 0);
  count_time(PRODUCTS, time);
  normalize(pass.x, pass.h, T, layer->ffn_norm);
  count_time(REST, time);
  multiply(&layer->ffn_hidden, FFN_HIDDEN, pass.h, row, NULL, pass.hidden, wide_row(F), T, C, F, 1);
  multiply(&layer->ffn_out, FFN_OUT, pass.hidden, wide_row(F), pass.x, pass.x, row, T, F, C, 0);
  count_time(PRODUCTS, time);
}

/* Computes the logits of the tokens that require them; their rows move to the front of `x` and `h`. */
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
  if (wanted) {
    normalize(pass.x, pass.h, wanted, m->final_norm);
    multiply(&m->head, NOT_ADAPTED, pass.h, pass.row, NULL, logits, padded(m->vocab), wanted,
             m->units, m->vocab, 0);
  }
  count_time(HEAD, time);
}

static int has_planes(const Model *m, const Matrix *matrix) {
  return !m->block || matrix->planes == 1 || matrix->planes == 2;
}

static int is_model(const Model *m) {
  const int32_t most = 1 << 24; /* no product of sizes overflows */
  if (m->num_layers < 1 || m->units < 1 || m->heads < 1 || m->hidden < 1 || m->vocab < 1 ||
      m->max_length < 1 || m->num_layers > most || m->units > most || m->hidden > most ||
      m->vocab > most || m->max_length > most || m->units % m->heads || m->block < 0 ||
      m->block > MAX_BLOCK || m->block % 4 || !has_planes(m, &m->head))
    return 0;
  for (const Layer *layer = m->layers; layer < m->layers + m->num_layers; layer++)
    if (!has_planes(m, &layer->qkv) || !has_planes(m, &layer->attention_out) ||
        !has_planes(m, &layer->ffn_hidden) || !has_planes(m, &layer->ffn_out))
      return 0;
  return 1;
}

/* The largest rank of an adapter's products; -1 if one of them is out of range. */
static int32_t largest_rank(const Model *m, const AdapterLayer *layers) {
  int32_t most = 0;
  for (const AdapterLayer *layer = layers; layers && layer < layers + m->num_layers; layer++) {
    const LowRank *low[] = {&layer->qkv, &layer->attention_out, &layer->ffn_hidden, &layer->ffn_out};
    for (size_t i = 0; i < sizeof low / sizeof *low; i++) {
      if (low[i]->rank < 0 || low[i]->rank > MAX_RANK) return -1;
      most = low[i]->rank > most ? low[i]->rank : most;
    }
  }
  return most;
}

static int is_piece(const Model *m, const Piece *piece) {
  if (piece->count < 1 || piece->position < 0 || piece->num_logits < 0 ||
      piece->num_logits > piece->count || piece->count > m->max_length - piece->position)
    return 0;
  for (int32_t i = 0; i < piece->count; i++)
    if (piece->ids[i] < 0 || piece->ids[i] >= m->vocab) return 0;
  return 1;
}

size_t page_bytes(const Model *m) {
  const size_t number = m->block ? sizeof(uint16_t) : sizeof(float);
  return 2 * padded(m->units / m->heads) * PAGE_TOKENS * number * m->heads * m->num_layers;
}

/* Places the pass's arrays one behind the other in `memory`; returns their bytes. */
static size_t place(const Model *m, size_t count, size_t wanted, size_t length, size_t rank,
                    uint8_t *memory) {
  const size_t row = padded(m->units), threads = num_threads();
  const size_t widest = m->hidden > m->units ? m->hidden : m->units, block = m->block;
  const size_t more = count > wanted ? count : wanted;
  size_t bytes = 0;
#define PLACE(field, size)                            \
  pass.field = memory ? (void *)(memory + bytes) : NULL; \
  bytes += padded(size) * sizeof(float)
  pass.row = row;
  pass.max_pages = ceil_div(length, PAGE_TOKENS);
  const size_t queries = m->heads * FEW_QUERIES > MAX_QUERIES ? m->heads * FEW_QUERIES : MAX_QUERIES;
  pass.scores_size =
      queries * (pass.max_pages * PAGE_TOKENS + padded(m->units / m->heads)) + padded(queries);
  pass.down_row = padded(rank);
  PLACE(x, count * row);
  PLACE(h, more * row);
  PLACE(qkv, count * wide_row(3 * m->units) + LINE);
  PLACE(attended, count * row);
  PLACE(hidden, count * wide_row(m->hidden));
  PLACE(scores, threads * pass.scores_size);
  PLACE(pages, threads * (pass.max_pages + 1) * 2);
  PLACE(quantized, block ? quantized_bytes(more, 2, widest, block) / sizeof(float) : 0);
  PLACE(runs, (count + 1) * sizeof(Run) / sizeof(float));
  PLACE(spans, rank ? (count + 1) * sizeof(Span) / sizeof(float) : 0);
  PLACE(adapters, rank ? (count + 1) * 2 : 0);
  PLACE(down, count * padded(rank));
#undef PLACE
  return bytes;
}

size_t scratch_bytes(const Model *m, size_t count, size_t wanted, size_t length, size_t rank) {
  return place(m, count, wanted, length, rank, NULL);
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

/* Makes spans of runs with adapters; adjacent runs with the same adapter share a span. */
static void find_spans(void) {
  for (const Run *run = pass.runs; run < pass.runs + pass.num_runs; run++) {
    const AdapterLayer *adapter = run->piece->adapter;
    Span *last = pass.num_spans ? &pass.spans[pass.num_spans - 1] : NULL;
    for (size_t i = 0; i < run->count; i++) pass.adapters[run->token + i] = adapter;
    if (!adapter) continue;
    if (last && last->adapter == adapter && last->token + last->count == run->token &&
        last->count + run->count <= RUN)
      last->count += run->count;
    else
      pass.spans[pass.num_spans++] = (Span){adapter, run->token, run->count};
  }
}

PassStatus run_pass(const Model *model, uint8_t *arena, const Piece *pieces, size_t num_pieces,
                    float *logits) {
  double time = now();
  size_t count = 0, wanted = 0, length = 0;
  int32_t rank = 0;
  if (!is_model(model)) return PASS_BAD_MODEL;
  for (size_t i = 0; i < num_pieces; i++) {
    const int32_t of_piece = largest_rank(model, pieces[i].adapter);
    if (!is_piece(model, &pieces[i]) || of_piece < 0) return PASS_BAD_PIECE;
    rank = of_piece > rank ? of_piece : rank;
    const size_t end = (size_t)pieces[i].position + pieces[i].count;
    count += pieces[i].count;
    wanted += pieces[i].num_logits;
    length = end > length ? end : length;
  }
  if (!reserve(scratch_bytes(model, count, wanted, length, rank))) return PASS_NO_MEMORY;
  begin_parallel();
  place(model, count, wanted, length, rank, scratch.memory);
  pass.model = model;
  pass.arena = arena;
  pass.pieces = pieces;
  pass.num_pieces = num_pieces;
  pass.tokens = count;
  pass.head_bytes = page_bytes(model) / model->num_layers / model->heads / 2;
  pass.num_runs = pass.num_spans = 0;
  size_t token = 0;
  for (size_t i = 0; i < num_pieces; i++) {
    size_t position = pieces[i].position, left = pieces[i].count;
    for (size_t taken; left; left -= taken, position += taken, token += taken) {
      taken = left < RUN ? left : RUN;
      pass.runs[pass.num_runs++] = (Run){&pieces[i], token, position, taken};
    }
  }
  if (rank) find_spans();
  /* Parts of many heads read memory faster; enough parts keep all threads busy if rows differ. */
  pass.head_groups = THREAD_PARTS * num_threads() / (pass.num_runs + 1) + 1;
  if (pass.head_groups > (size_t)model->heads) pass.head_groups = model->heads;
  in_parallel(embed_part, NULL, pass.num_runs);
  count_time(EMBEDDING, &time);
  for (pass.layer = 0; pass.layer < model->num_layers; pass.layer++)
    compute_layer(&model->layers[pass.layer], &time);
  compute_logits(logits, &time);
  end_parallel();
  return PASS_OK;
}

/* --- Packing ------------------------------------------------------------------------------------- */

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

/* Quantizes the numbers of one column in one block to int8 with a scale. */
static void pack_block(const float *numbers, size_t block, size_t lane, uint8_t *packed) {
  float largest = 0;
  for (size_t i = 0; i < block; i++) {
    const float magnitude = numbers[i] < 0 ? -numbers[i] : numbers[i];
    largest = magnitude > largest ? magnitude : largest;
  }
  const float scale = largest / 127, times = largest > 0 ? 127 / largest : 0;
  for (size_t i = 0; i < block; i++) {
    const float shifted = numbers[i] * times + 12582912.0f; /* rounds to the nearest, 1.5 * 2^23 */
    int32_t number;
    memcpy(&number, &shifted, 4);
    packed[i / 4 * 4 * LINE + lane * 4 + i % 4] = (uint8_t)(number - 0x4b400000 + 128);
  }
  memcpy(packed + LINE * block + lane * sizeof scale, &scale, sizeof scale);
}

void pack(const void *source, SourceType type, size_t column_stride, size_t stride, size_t n,
          size_t k, size_t block, size_t first, size_t last, uint8_t *packed) {
  for (size_t group = first; group < last; group++) {
    uint8_t *to = packed + group * group_bytes(k, block);
    for (size_t lane = 0; lane < LINE; lane++) {
      const size_t column = group * LINE + lane;
      const size_t at_once = block ? block : MAX_BLOCK;
      for (size_t begin = 0, b = 0; begin < k; begin += at_once, b++) {
        float numbers[MAX_BLOCK] = {0};
        const size_t count = k - begin < at_once ? k - begin : at_once;
        if (column < n)
          for (size_t i = 0; i < count; i++)
            numbers[i] = read_number(source, type, column * column_stride + (begin + i) * stride);
        if (block)
          pack_block(numbers, block, lane, to + b * LINE * (block + sizeof(float)));
        else
          for (size_t i = 0; i < count; i++)
            ((float *)to)[(begin + i) * LINE + lane] = numbers[i];
      }
    }
  }
}
