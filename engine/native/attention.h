/* LayerNorm, rotations, GELU and attention over K/V pages, for one set of instructions. */

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

/* The factor of x (units,) that makes its mean square 1: LayerNorm of a row whose mean is 0. */
TARGET static float NAME(rms_scale)(const float *x, size_t units, float epsilon) {
  floats squares[PARTS] = {{0}};
  for (size_t i = 0; i < padded(units); i += LINE)
    EACH(p, PARTS) {
      const floats number = NAME(load)(x + i + p * LANES);
      squares[p] = FMA(number, number, squares[p]);
    }
  return 1 / sqrtf(NAME(sum)(squares) / units + epsilon);
}

/* Multiplies x (n, width) with an orthogonal matrix (n, n), the Kronecker product of one for each prime
   factor of n: 1 / sqrt(2) [1 1; 1 -1], a Hadamard matrix, and I - 2 / p for odd ones. It is its own
   inverse, spreads a large number over many, and has only additions and multiplications by constants: the
   bits are the same everywhere. https://arxiv.org/abs/2404.00456 is about what it is used for. */
TARGET static void NAME(rotate)(float *x, size_t n, size_t width) {
  size_t left = n, run = width; /* run: floats from a number to the next that it is added to */
  int halvings = 0;
  for (; left % 2 == 0; left /= 2, run *= 2, halvings++)
    for (float *a = x; a < x + n * width; a += 2 * run)
      for (size_t i = 0; i < run; i++) {
        const float sum = a[i] + a[run + i], difference = a[i] - a[run + i];
        a[i] = sum;
        a[run + i] = difference;
      }
  for (size_t p = 3; left > 1; p += 2)
    for (; left % p == 0; left /= p, run *= p)
      for (float *a = x; a < x + n * width; a += p * run)
        for (size_t i = 0; i < run; i++) {
          float sum = 0;
          for (size_t j = 0; j < p; j++) sum += a[j * run + i];
          sum *= 2.0f / p;
          for (size_t j = 0; j < p; j++) a[j * run + i] -= sum;
        }
  const float scale = ldexpf(halvings % 2 ? 0.707106781f : 1, -(halvings / 2));
  for (size_t i = 0; i < n * width; i++) x[i] *= scale;
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

/* On a page a head's keys in fp32 are (size, PAGE_TOKENS) and its values (PAGE_TOKENS, padded size): the
   keys of sixteen tokens lie beside each other, and a token's values do. In int8 both are packed as a
   matrix's group is (product.h): keys have the tokens as columns, (size / 4, PAGE_TOKENS, 4), values the
   tokens as rows, a group for each line of the size, (size / LINE, PAGE_TOKENS / 4, LINE, 4). Behind the
   numbers is a scale for each token. */

/* The numbers in int8 of a token's keys or values (size,), plus 128, as if packed; returns their scale.
   NaN and infinity would reach later tokens: a token that has them counts as zeros. */
TARGET INLINE float NAME(store_token)(const float *x, size_t size, uint8_t *to, int is_values) {
  const float largest = NAME(largest_magnitude)(x, size);
  const float times = largest > 0 && isfinite(largest) ? 127 / largest : 0;
  for (size_t begin = 0; begin < size; begin += DEPTH) {
    int32_t numbers[DEPTH];
    const size_t count = size - begin < DEPTH ? size - begin : DEPTH;
    NAME(round_depth)(x + begin, count, times, numbers);
    if (!times) memset(numbers, 0, sizeof numbers);
    for (size_t i = 0; i < count; i++) {
      const size_t s = begin + i;
      const size_t at = is_values ? s / LINE * LINE * PAGE_TOKENS + s % LINE * 4
                                  : s / 4 * 4 * PAGE_TOKENS + s % 4;
      to[at] = (uint8_t)(numbers[i] + 128);
    }
  }
  return times ? largest / 127 : 0;
}

TARGET static void NAME(store_kv)(int int8, const float *k, const float *v, size_t size, size_t slot,
                                  void *keys, void *values) {
  const size_t line = padded(size);
  if (!int8) {
    float *to = (float *)values + slot * line;
    for (size_t s = 0; s < line; s++) { /* NaN times a weight of 0 is NaN */
      if (s < size) ((float *)keys)[s * PAGE_TOKENS + slot] = k[s];
      to[s] = s < size && isfinite(v[s]) ? v[s] : 0;
    }
    return;
  }
  uint8_t *to = (uint8_t *)values + slot / 4 * 4 * LINE + slot % 4;
  ((float *)((uint8_t *)keys + line * PAGE_TOKENS))[slot] =
      NAME(store_token)(k, size, (uint8_t *)keys + 4 * slot, 0);
  ((float *)((uint8_t *)values + line * PAGE_TOKENS))[slot] = NAME(store_token)(v, size, to, 1);
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

/* Prefetches keys or values if queries are few: then memory is the limit, not arithmetic. */
TARGET INLINE void NAME(prefetch_line)(int Q, const void *numbers) {
  if (Q <= FEW_QUERIES) __builtin_prefetch((const uint8_t *)numbers + KV_PREFETCH);
}

/* The scores of a head's Q queries against its keys on pages n, ..., n + N - 1. */
TARGET INLINE void NAME(score_pages)(int Q, int N, const Queries *x, const float *q, size_t head,
                                     size_t n, float *scores, size_t stride) {
  floats sums[MAX_QUERIES][PARTS];
  EACH(i, Q * N) EACH(p, PARTS) sums[i][p] = (floats){0};
  for (size_t s = 0; s < x->size; s++)
    EACH(page, N) {
      const uint8_t *packed = x->pages[n + page] + head * x->head_bytes;
      const float *keys = (const float *)packed + s * PAGE_TOKENS;
      NAME(prefetch_line)(Q, keys);
      EACH(p, PARTS) {
        const floats key = NAME(load)(keys + p * LANES);
        EACH(i, Q) {
          floats *sum = &sums[page * Q + i][p];
          *sum = FMA(NAME(all)(q[i * x->stride + s]), key, *sum);
        }
      }
    }
  EACH(page, N) EACH(i, Q) EACH(p, PARTS)
    NAME(store)(scores + i * stride + (n + page) * PAGE_TOKENS + p * LANES,
                sums[page * Q + i][p] * x->scale);
}

/* What the 128 that keys and values are stored with adds to a sum; `total`: of the numbers of x. */
TARGET INLINE uint32_t NAME(offset)(int32_t total) { return WEIGHT_OFFSET * (uint32_t)total; }

/* The same of quantized queries and keys. */
TARGET INLINE void NAME(score_int8_pages)(int Q, int N, const Queries *x, const Rounded *q,
                                          size_t head, size_t n, float *scores, size_t stride) {
  NAME(Dots) dots[MAX_QUERIES][PARTS];
  const int32_t *fours = q->fours + head * Q * q->stride;
  EACH(i, Q * N) EACH(p, PARTS)
    dots[i][p] = NAME(begin_dots)((ints){0} - (int32_t)NAME(offset)(q->sums[head * Q + i % Q]));
  for (size_t s = 0; s < x->size; s += 4)
    EACH(page, N) {
      const uint8_t *keys = x->pages[n + page] + head * x->head_bytes + s * PAGE_TOKENS;
      NAME(prefetch_line)(Q, keys);
      EACH(p, PARTS) {
        const NAME(Weights) key = NAME(load_weights)(keys + 4 * LANES * p);
        EACH(i, Q) NAME(dot)(&dots[page * Q + i][p], key, fours + i * q->stride + s / 2);
      }
    }
  EACH(page, N) EACH(p, PARTS) {
    const uint8_t *keys = x->pages[n + page] + head * x->head_bytes;
    const floats scale =
        NAME(load)((const float *)(keys + padded(x->size) * PAGE_TOKENS) + p * LANES);
    EACH(i, Q)
      NAME(store)(scores + i * stride + (n + page) * PAGE_TOKENS + p * LANES,
                  __builtin_convertvector(NAME(total)(dots[page * Q + i][p]), floats) *
                      (scale * q->scales[head * Q + i]));
  }
}

/* Adds a head's values of tokens [t, end), weighted, to sums (Q, padded size), in N lines from `at`. */
TARGET INLINE void NAME(add_values)(int Q, int N, const Queries *x, size_t head, size_t at, size_t t,
                                    size_t end, const float *weights, size_t stride, float *to) {
  floats sums[MAX_SUMS][PARTS];
  const size_t line = padded(x->size);
  EACH(i, Q) EACH(j, N) EACH(p, PARTS)
    sums[j * Q + i][p] = NAME(load)(to + i * line + at + j * LINE + p * LANES);
  while (t < end) {
    const float *values = (const float *)(x->pages[t / PAGE_TOKENS] + x->values + head * x->head_bytes);
    const size_t stop = t + PAGE_TOKENS < end ? t + PAGE_TOKENS : end;
    for (values += at; t < stop; t++, values += line)
      EACH(j, N) {
        NAME(prefetch_line)(Q, values + j * LINE);
        EACH(p, PARTS) {
          const floats value = NAME(load)(values + j * LINE + p * LANES);
          EACH(i, Q) {
            floats *sum = &sums[j * Q + i][p];
            *sum = FMA(NAME(all)(weights[i * stride + t]), value, *sum);
          }
        }
      }
  }
  EACH(i, Q) EACH(j, N) EACH(p, PARTS)
    NAME(store)(to + i * line + at + j * LINE + p * LANES, sums[j * Q + i][p]);
}

/* The same of quantized weights and values, on whole pages [n, end). */
TARGET INLINE void NAME(add_int8_values)(int Q, int N, const Queries *x, size_t head, size_t at,
                                         size_t n, size_t end, const int32_t *weights, size_t stride,
                                         int32_t *to) {
  NAME(Dots) dots[MAX_SUMS][PARTS];
  const size_t line = padded(x->size);
  EACH(i, Q) EACH(j, N) EACH(p, PARTS) {
    ints sum;
    memcpy(&sum, to + i * line + at + j * LINE + p * LANES, sizeof sum);
    dots[j * Q + i][p] = NAME(begin_dots)(sum);
  }
  for (; n < end; n++) {
    const uint8_t *values = x->pages[n] + x->values + head * x->head_bytes + at * PAGE_TOKENS;
    for (size_t t = 0; t < PAGE_TOKENS; t += 4, values += 4 * LINE)
      EACH(j, N) {
        NAME(prefetch_line)(Q, values + j * LINE * PAGE_TOKENS);
        EACH(p, PARTS) {
          const NAME(Weights) value =
              NAME(load_weights)(values + j * LINE * PAGE_TOKENS + 4 * LANES * p);
          EACH(i, Q)
            NAME(dot)(&dots[j * Q + i][p], value, weights + i * stride + (n * PAGE_TOKENS + t) / 2);
        }
      }
  }
  EACH(i, Q) EACH(j, N) EACH(p, PARTS) {
    const ints sum = NAME(total)(dots[j * Q + i][p]);
    memcpy(to + i * line + at + j * LINE + p * LANES, &sum, sizeof sum);
  }
}

/* Quantizes Q queries of each head, with the scale of their scores. */
TARGET INLINE void NAME(round_queries)(int Q, const Queries *x, const float *q, Rounded *to) {
  for (size_t head = 0; head < x->heads; head++)
    for (int i = 0; i < Q; i++) {
      const size_t query = head * Q + i;
      to->scales[query] =
          x->scale * NAME(quantize_to)(q + i * x->stride + head * x->size, x->size, x->size, 1,
                                       0, to->fours + query * to->stride, &to->sums[query]);
    }
}

/* Multiplies a head's weights (length,) with the scales of its values and quantizes them in place. */
TARGET INLINE float NAME(round_weights)(const Queries *x, size_t head, size_t length,
                                        float *weights, int32_t *total) {
  for (size_t t = 0; t < length; t += PAGE_TOKENS) {
    const uint8_t *values = x->pages[t / PAGE_TOKENS] + x->values + head * x->head_bytes;
    const float *scales = (const float *)(values + padded(x->size) * PAGE_TOKENS);
    EACH(p, PARTS) {
      const floats weight = NAME(load)(weights + t + p * LANES);
      const ints is_seen = weight != (floats){0}; /* what is not may have any scale */
      const floats product = weight * NAME(load)(scales + p * LANES);
      NAME(store)(weights + t + p * LANES, (floats)((ints)product & is_seen));
    }
  }
  return NAME(quantize_to)(weights, length, x->max_length, 1, 0, (int32_t *)weights, total);
}

/* Q queries of each head of one row, at positions position, position + 1, ...: each sees the tokens up
   to its own. `scores` is memory of attend_floats. In fp32 a query's sums run over the tokens in their
   order; those beyond its position have the weight 0, which changes no sum. Q and `int8` are constants. */
TARGET INLINE void NAME(attend_to)(int Q, int int8, const Queries *x, const float *q,
                                   size_t position, float *scores, float *out) {
  const size_t tokens = position + Q, num_pages = (tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
  const size_t length = num_pages * PAGE_TOKENS, stride = whole_depths(length); /* of scores */
  const size_t line = padded(x->size), queries = x->heads * Q;
  float *sums = scores + queries * stride, *factors = sums + queries * line;
  Rounded rounded = {.scales = factors + queries, .sums = (int32_t *)(factors + 2 * queries),
                     .fours = (int32_t *)(factors + 3 * queries),
                     .stride = whole_depths(x->size) / 2};
  if (int8) NAME(round_queries)(Q, x, q, &rounded);
  /* A few pages or lines of values at once, where few queries would leave the processor waiting for each
     sum. Several heads are read as they lie in memory, a single one page after page. */
  enum { AT_ONCE = 4 };
  const int at_once = Q < AT_ONCE ? int8 ? AT_ONCE / Q : AT_ONCE : 1;
  const size_t step = x->heads > 1 ? AT_ONCE : num_pages;
  for (size_t begin = 0; begin < num_pages; begin += step)
    for (size_t head = 0; head < x->heads; head++) {
      const size_t end = begin + step < num_pages ? begin + step : num_pages;
      const float *of_head = q + head * x->size;
      float *to = scores + head * Q * stride;
      for (size_t n = begin; n < end;)
        if (n + at_once <= end && int8)
          NAME(score_int8_pages)(Q, at_once, x, &rounded, head, n, to, stride), n += at_once;
        else if (n + at_once <= end)
          NAME(score_pages)(Q, at_once, x, of_head, head, n, to, stride), n += at_once;
        else if (int8)
          NAME(score_int8_pages)(Q, 1, x, &rounded, head, n, to, stride), n++;
        else
          NAME(score_pages)(Q, 1, x, of_head, head, n, to, stride), n++;
    }

  memset(sums, 0, queries * line * sizeof *sums);
  for (size_t i = 0; i < queries; i++) {
    float *of_query = scores + i * stride;
    factors[i] = 1 / NAME(softmax)(of_query, position + i % Q + 1, length);
    if (int8)
      factors[i] *= NAME(round_weights)(x, i / Q, length, of_query, &rounded.sums[i]);
  }

  const int lines = Q <= AT_ONCE ? int8 ? AT_ONCE / Q : AT_ONCE : 1;
  for (size_t begin = 0; begin < num_pages; begin += step)
    for (size_t head = 0; head < x->heads; head++) {
      const size_t first = begin * PAGE_TOKENS, last = first + step * PAGE_TOKENS;
      const size_t end = last < tokens ? last : tokens;
      const size_t end_page = (end + PAGE_TOKENS - 1) / PAGE_TOKENS;
      const float *weights = scores + head * Q * stride;
      float *to = sums + head * Q * line;
      for (size_t at = 0; at < line;)
        if (at + lines * LINE <= line && int8)
          NAME(add_int8_values)(Q, lines, x, head, at, begin, end_page, (const int32_t *)weights,
                                stride, (int32_t *)to), at += lines * LINE;
        else if (at + lines * LINE <= line)
          NAME(add_values)(Q, lines, x, head, at, first, end, weights, stride, to), at += lines * LINE;
        else if (int8)
          NAME(add_int8_values)(Q, 1, x, head, at, begin, end_page, (const int32_t *)weights, stride,
                                (int32_t *)to), at += LINE;
        else
          NAME(add_values)(Q, 1, x, head, at, first, end, weights, stride, to), at += LINE;
    }

  for (size_t head = 0; head < x->heads; head++)
    for (int i = 0; i < Q; i++) {
      const size_t query = head * Q + i;
      float *to = out + i * x->out_stride + head * x->size;
      const float *sum = sums + query * line;
      for (size_t s = 0; s < x->size; s++)
        to[s] = factors[query] *
                (int8 ? (float)(int32_t)(((const uint32_t *)sum)[s] - NAME(offset)(rounded.sums[query]))
                      : sum[s]);
    }
}

TARGET static size_t NAME(attend)(const Queries *x, size_t first, size_t left, float *scores,
                                  float *out) {
  const float *q = x->q + first * x->stride;
  const size_t position = x->position + first;
#define USE(Q)                                                             \
  if (left >= Q)                                                           \
    return x->int8 ? NAME(attend_to)(Q, 1, x, q, position, scores, out)    \
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
