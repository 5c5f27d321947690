/* LayerNorm, GELU and attention over K/V pages, for one set of instructions. */

TARGET static void NAME(layer_norm)(const float *x, size_t units, Norm norm, float epsilon,
                                    float *y) {
  const size_t length = padded(units);
  floats sums[PARTS] = {{0}}, squares[PARTS] = {{0}};
  for (size_t i = 0; i < length; i += LINE)
    EACH(p, PARTS) sums[p] += NAME(load)(x + i + p * LANES);
  const float mean = NAME(sum)(sums) / units;
  for (size_t i = 0; i < length; i += LINE)
    EACH(p, PARTS) NAME(store)(y + i + p * LANES, NAME(load)(x + i + p * LANES) - mean);
  for (size_t i = units; i < length; i++) y[i] = 0;
  for (size_t i = 0; i < length; i += LINE)
    EACH(p, PARTS) {
      const floats centered = NAME(load)(y + i + p * LANES);
      squares[p] = FMA(centered, centered, squares[p]);
    }
  const float scale = 1 / sqrtf(NAME(sum)(squares) / units + epsilon);
  for (size_t i = 0; i < length; i += LANES)
    NAME(store)(y + i, FMA(NAME(load)(y + i) * scale, NAME(load)(norm.gamma + i),
                           NAME(load)(norm.beta + i)));
}

/* `count` is a multiple of LINE. The tanh form is Hendrycks and Gimpel's, gelu_new in Hugging Face's
   configurations: 0.5 x (1 + tanh u) = x / (1 + e^-2u). */
TARGET static void NAME(gelu)(float *x, size_t count, int tanh_form) {
  if (tanh_form)
    for (size_t i = 0; i < count; i += LANES) {
      const floats a = NAME(load)(x + i);
      const floats u = 1.5957691216057308f * FMA(0.044715f * a * a, a, a); /* 2 sqrt(2 / pi) */
      NAME(store)(x + i, a / (1.0f + NAME(exponential)(-u)));
    }
  else
    for (size_t i = 0; i < count; i += LANES) {
      const floats a = NAME(load)(x + i), half = 0.5f * a;
      NAME(store)(x + i, FMA(half, NAME(error_function)(a * 0.707106781f), half));
    }
}

/* On a page a head's keys are (size, PAGE_TOKENS) and its values (PAGE_TOKENS, padded size): so the keys
   of sixteen tokens lie beside each other, and a token's values do. Both take as many bytes. fp16 holds
   65504 at most: larger numbers are stored as that. */

TARGET static void NAME(store_kv)(int half, const float *k, const float *v, size_t size, size_t slot,
                                  void *keys, void *values) {
  const size_t line = padded(size);
  if (!half) {
    float *to = (float *)values + slot * line;
    for (size_t s = 0; s < line; s++) { /* NaN times a weight of 0 is NaN */
      if (s < size) ((float *)keys)[s * PAGE_TOKENS + slot] = k[s];
      to[s] = s < size && isfinite(v[s]) ? v[s] : 0;
    }
    return;
  }
  uint16_t *to = (uint16_t *)values + slot * line;
  for (size_t i = 0; i < size; i += LINE) {
    const float *from[2] = {k + i, v + i};
    float lines[2][LINE] = {{0}};
    uint16_t halves[2][LINE];
    const size_t length = size - i < LINE ? size - i : LINE;
    if (length < LINE)
      for (int j = 0; j < 2; j++) from[j] = memcpy(lines[j], from[j], length * sizeof *k);
    EACH(j, 2) EACH(p, PARTS) {
      floats x = NAME(load)(from[j] + p * LANES);
      x = LOWER(x, NAME(all)(65504.0f)); /* NaN becomes 65504, too */
      x = HIGHER(x, NAME(all)(-65504.0f));
      STORE_HALVES(halves[j] + p * LANES, x);
    }
    for (size_t s = 0; s < length; s++)
      ((uint16_t *)keys)[(i + s) * PAGE_TOKENS + slot] = halves[0][s];
    memcpy(to + i, halves[1], sizeof *halves);
  }
}

/* Turns the first `count` of `length` scores to weights and the others to 0; returns their sum. */
TARGET static float NAME(softmax)(float *scores, size_t count, size_t length) {
  for (size_t t = count; t < length; t++) scores[t] = -INFINITY;
  floats most[PARTS], sums[PARTS];
  EACH(p, PARTS) most[p] = NAME(all)(-INFINITY);
  for (size_t t = 0; t < length; t += LINE)
    EACH(p, PARTS) {
      const floats x = NAME(load)(scores + t + p * LANES);
      most[p] = HIGHER(x, most[p]);
    }
  const float largest = NAME(largest)(most);
  EACH(p, PARTS) sums[p] = (floats){0};
  for (size_t t = 0; t < length; t += LINE)
    EACH(p, PARTS) {
      const floats x = NAME(load)(scores + t + p * LANES);
      const floats weight = (floats)((ints)NAME(exponential)(x - largest) & (x != -INFINITY));
      sums[p] += weight;
      NAME(store)(scores + t + p * LANES, weight);
    }
  return NAME(sum)(sums);
}

TARGET INLINE floats NAME(load_number)(int half, const uint8_t *numbers, size_t i) {
  return half ? LOAD_HALVES(numbers + i * 2) : NAME(load)((const float *)numbers + i);
}

/* Prefetches keys or values if queries are few: then memory is the limit, not arithmetic. */
TARGET INLINE void NAME(prefetch_line)(int Q, int half, const uint8_t *numbers, size_t i) {
  if (Q <= FEW_QUERIES) __builtin_prefetch(numbers + i * (half ? 2 : 4) + KV_PREFETCH);
}

/* The scores of a head's Q queries against its keys on pages n, ..., n + N - 1. */
TARGET INLINE void NAME(score_pages)(int Q, int N, int half, const Queries *x, const float *q,
                                     size_t head, size_t n, float *scores, size_t length) {
  floats sums[MAX_QUERIES][PARTS];
  const size_t keys = head * padded(x->size) * PAGE_TOKENS;
  EACH(i, Q * N) EACH(p, PARTS) sums[i][p] = (floats){0};
  for (size_t s = 0; s < x->size; s++)
    EACH(page, N) {
      const size_t number = keys + s * PAGE_TOKENS;
      NAME(prefetch_line)(Q, half, x->pages[n + page], number);
      EACH(p, PARTS) {
        const floats key = NAME(load_number)(half, x->pages[n + page], number + p * LANES);
        EACH(i, Q) {
          floats *sum = &sums[page * Q + i][p];
          *sum = FMA(NAME(all)(q[i * x->stride + s]), key, *sum);
        }
      }
    }
  EACH(page, N) EACH(i, Q) EACH(p, PARTS)
    NAME(store)(scores + i * length + (n + page) * PAGE_TOKENS + p * LANES,
                sums[page * Q + i][p] * x->scale);
}

/* Adds a head's values of tokens [t, end), weighted, to sums (Q, padded size), in N lines from `at`. */
TARGET INLINE void NAME(add_values)(int Q, int N, int half, const Queries *x, size_t head, size_t at,
                                    size_t t, size_t end, const float *weights, size_t length,
                                    float *to) {
  enum { MAX_SUMS = 16 };
  floats sums[MAX_SUMS][PARTS];
  const size_t line = padded(x->size), values = x->values + head * line * PAGE_TOKENS + at;
  EACH(i, Q) EACH(j, N) EACH(p, PARTS)
    sums[j * Q + i][p] = NAME(load)(to + i * line + at + j * LINE + p * LANES);
  while (t < end) {
    const uint8_t *page = x->pages[t / PAGE_TOKENS];
    const size_t stop = t + PAGE_TOKENS < end ? t + PAGE_TOKENS : end;
    for (size_t number = values; t < stop; t++, number += line)
      EACH(j, N) {
        NAME(prefetch_line)(Q, half, page, number + j * LINE);
        EACH(p, PARTS) {
          const floats value = NAME(load_number)(half, page, number + j * LINE + p * LANES);
          EACH(i, Q) {
            floats *sum = &sums[j * Q + i][p];
            *sum = FMA(NAME(all)(weights[i * length + t]), value, *sum);
          }
        }
      }
  }
  EACH(i, Q) EACH(j, N) EACH(p, PARTS)
    NAME(store)(to + i * line + at + j * LINE + p * LANES, sums[j * Q + i][p]);
}

/* Q queries of each head of one row, at positions position, position + 1, ...: each sees the tokens up
   to its own. `scores` has space for heads * Q times the row's pages, and for as many sums. A query's
   sums run over the tokens in their order; those beyond its position have the weight 0, which changes no
   sum. Q and `half` are constants. */
TARGET INLINE void NAME(attend_to)(int Q, int half, const Queries *x, const float *q,
                                   size_t position, float *scores, float *out) {
  const size_t tokens = position + Q, num_pages = (tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
  const size_t length = num_pages * PAGE_TOKENS; /* of a query's scores */
  const size_t line = padded(x->size), queries = x->heads * Q;
  /* A few pages or lines of values at once, where few queries would leave the processor waiting for each
     sum. Several heads are read as they lie in memory, a single one page after page. */
  enum { AT_ONCE = 4 };
  const size_t step = x->heads > 1 ? AT_ONCE : num_pages;
  for (size_t begin = 0; begin < num_pages; begin += step)
    for (size_t head = 0; head < x->heads; head++) {
      const size_t end = begin + step < num_pages ? begin + step : num_pages;
      const float *of_head = q + head * x->size;
      float *to = scores + head * Q * length;
      size_t n = begin;
      if (Q < AT_ONCE)
        for (; n + AT_ONCE <= end; n += AT_ONCE)
          NAME(score_pages)(Q, AT_ONCE, half, x, of_head, head, n, to, length);
      for (; n < end; n++) NAME(score_pages)(Q, 1, half, x, of_head, head, n, to, length);
    }

  float *sums = scores + queries * length;
  memset(sums, 0, queries * line * sizeof *sums);
  float *weight = sums + queries * line;
  for (size_t i = 0; i < queries; i++)
    weight[i] = 1 / NAME(softmax)(scores + i * length, position + i % Q + 1, length);

  for (size_t begin = 0; begin < num_pages; begin += step)
    for (size_t head = 0; head < x->heads; head++) {
      const size_t first = begin * PAGE_TOKENS, last = first + step * PAGE_TOKENS;
      const size_t end = last < tokens ? last : tokens;
      const float *weights = scores + head * Q * length;
      float *to = sums + head * Q * line;
      size_t at = 0;
      if (Q <= AT_ONCE)
        for (; at + AT_ONCE * LINE <= line; at += AT_ONCE * LINE)
          NAME(add_values)(Q, AT_ONCE, half, x, head, at, first, end, weights, length, to);
      for (; at < line; at += LINE)
        NAME(add_values)(Q, 1, half, x, head, at, first, end, weights, length, to);
    }

  for (size_t head = 0; head < x->heads; head++)
    for (int i = 0; i < Q; i++) {
      const size_t query = head * Q + i;
      for (size_t s = 0; s < x->size; s++)
        out[i * x->out_stride + head * x->size + s] = sums[query * line + s] * weight[query];
    }
}

TARGET static size_t NAME(attend)(const Queries *x, size_t first, size_t left, float *scores,
                                  float *out) {
  const float *q = x->q + first * x->stride;
  const size_t position = x->position + first;
#define USE(Q)                                                             \
  if (left >= Q)                                                           \
    return x->half ? NAME(attend_to)(Q, 1, x, q, position, scores, out)    \
                   : NAME(attend_to)(Q, 0, x, q, position, scores, out),   \
           Q
#if LANES == LINE
  USE(12);
#endif
  USE(4);
  USE(2);
  USE(1);
#undef USE
  return 0;
}
